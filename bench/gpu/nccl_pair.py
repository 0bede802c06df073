"""Blocks from one GPU to another by NCCL: run with two processes by torch.distributed.run."""

import json
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist

_BLOCKS, _BLOCK_BYTES = 256, 2**21


def main() -> None:
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", timeout=timedelta(seconds=60), device_id=device)
    generator = torch.Generator(device).manual_seed(3)
    blocks = torch.zeros((_BLOCKS, _BLOCK_BYTES), dtype=torch.uint8, device=device)
    if rank == 0:
        blocks.random_(0, 256, generator=generator)
    took_s = 0.0
    for _ in range(3):  # the last of them counts
        torch.cuda.synchronize()
        begin_s = time.perf_counter()
        dist.send(blocks, 1) if rank == 0 else dist.recv(blocks, 0)
        torch.cuda.synchronize()
        took_s = time.perf_counter() - begin_s
    sums = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2)]
    dist.all_gather(sums, blocks.long().sum()[None])
    dist.destroy_process_group()
    if not torch.equal(*sums):
        raise SystemExit("the blocks that arrived are others")
    if rank == 0:
        print(json.dumps({"nccl_gb_per_s": round(blocks.nbytes / took_s / 1e9, 1)}))


if __name__ == "__main__":
    main()
