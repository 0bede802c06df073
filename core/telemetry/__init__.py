"""Traces: what each process did for a request, told to an OpenTelemetry collector.

`names` has every name that leaves the process. A `Tracer`, one per process, gives each request a
`RequestTrace` that collects spans. What is sampled or kept goes to the `SpanExporter`, whose thread
encodes it and has OpenTelemetry's SDK send it.
"""
