"""What several schedulers and gateways share: small Protocols, in memory and in Redis.

`lease` says who leads, `journal` what was streamed, `gateway.limits` who used how much. Every one
has an implementation for one process and one in Redis; `redis_link` is the one way to Redis.
"""
