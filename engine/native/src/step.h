// What a step and the KV pool look like from C. Mirrored in engine/native/library.py.
#pragma once

#include "numeric.h"

extern "C" {

// The sequences of one step. The tokens of sequence s are rows
// [first_rows[s], first_rows[s + 1]) of the step, at positions starts[s] and on.
struct TandemStep {
  long num_seqs;
  long max_blocks;
  const int32_t* first_rows;  // [num_seqs + 1]
  const int32_t* starts;      // [num_seqs]
  const int32_t* blocks;      // [num_seqs, max_blocks]
};

// [num_blocks, num_layers, 2, block_size, kv_heads, head_width], contiguous: elements, or, where
// `fp8` is not 0, bytes of heads as fp8.h has them.
struct TandemPool {
  void* base;
  long num_layers, block_size, kv_heads, head_dim, head_width, fp8;
};
}

namespace tandem {

// One layer of the pool. Offsets are in elements, or bytes in FP8, of keys; the values lie `half`
// further on.
struct Layer {
  long block_size, head_dim, width, token, half, block, first;
  bool fp8;

  Layer(const TandemPool& pool, long layer)
      : block_size(pool.block_size),
        head_dim(pool.head_dim),
        width(pool.head_width),
        token(pool.kv_heads * pool.head_width),
        half(pool.block_size * token),
        block(2 * half * pool.num_layers),
        first(2 * half * layer),
        fp8(pool.fp8 != 0) {}

  long offset(const int32_t* blocks, long position) const {
    return blocks[position / block_size] * block + first + position % block_size * token;
  }
};

}  // namespace tandem
