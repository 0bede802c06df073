// What happens to rows between the matrix products: norms, RoPE with the KV write, SwiGLU, and
// the embedding. Each row is computed by itself, in float32, and rounded once.

#include <algorithm>

#include "fp8.h"
#include "step.h"
#include "tile.h"

namespace tandem {
namespace {


// 1 / sqrt(mean square + eps).
template <class T>
__m512 inverse_rms(const typename T::Element* x, long count, float eps) {
  __m512 sum = _mm512_setzero_ps();
  for (long i = 0; i < count; i += kLanes) {
    const __m512 v = T::load(x + i, first_lanes(count - i));
    sum = _mm512_fmadd_ps(v, v, sum);
  }
  const float mean = _mm512_reduce_add_ps(sum) / float(count);
  return _mm512_set1_ps(1.0f / __builtin_sqrtf(mean + eps));
}

template <class T>
void norm(typename T::Element* hidden, const typename T::Element* delta,
          const typename T::Element* weight, typename T::Element* out, long rows, long columns,
          float eps, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && rows > 8)
  for (long row = 0; row < rows; ++row) {
    auto* x = hidden + row * columns;
    if (delta)
      for (long i = 0; i < columns; i += kLanes) {
        const __mmask16 lanes = first_lanes(columns - i);
        T::store(x + i, lanes,
                 _mm512_add_ps(T::load(x + i, lanes), T::load(delta + row * columns + i, lanes)));
      }
    const __m512 scale = inverse_rms<T>(x, columns, eps);
    for (long i = 0; i < columns; i += kLanes) {
      const __mmask16 lanes = first_lanes(columns - i);
      T::store(out + row * columns + i, lanes,
               _mm512_mul_ps(_mm512_mul_ps(T::load(x + i, lanes), scale),
                             T::load(weight + i, lanes)));
    }
  }
}

// silu(gate) * up, where gate_up is [rows][2 * inner].
template <class T>
void swiglu(const typename T::Element* gate_up, typename T::Element* out, long rows, long inner,
            int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && rows > 8)
  for (long row = 0; row < rows; ++row)
    for (long i = 0; i < inner; i += kLanes) {
      const __mmask16 lanes = first_lanes(inner - i);
      const __m512 gate = T::load(gate_up + row * 2 * inner + i, lanes);
      const __m512 up = T::load(gate_up + row * 2 * inner + inner + i, lanes);
      const __m512 power = _mm512_min_ps(_mm512_mul_ps(gate, _mm512_set1_ps(-kLog2E)),
                                         _mm512_set1_ps(126.0f));
      const __m512 below = _mm512_add_ps(exp2(power), _mm512_set1_ps(1.0f));
      __m512 inverse = _mm512_rcp14_ps(below);  // and one step of Newton's method
      inverse = _mm512_mul_ps(
          inverse, _mm512_fnmadd_ps(below, inverse, _mm512_set1_ps(2.0f)));
      T::store(out + row * inner + i, lanes,
               _mm512_mul_ps(_mm512_mul_ps(gate, inverse), up));
    }
}

// Turns dims i and i + D / 2 of one head, after its norm where there is one.
template <class T>
void turn(const typename T::Element* x, const float* cos, const float* sin,
          const typename T::Element* weight, float eps, long head_dim, typename T::Element* out) {
  const long half = head_dim / 2;
  const __m512 scale = weight ? inverse_rms<T>(x, head_dim, eps) : _mm512_set1_ps(1.0f);
  for (long i = 0; i < half; i += kLanes) {
    const __mmask16 lanes = first_lanes(half - i);
    __m512 a = T::load(x + i, lanes), b = T::load(x + half + i, lanes);
    if (weight) {
      a = _mm512_mul_ps(_mm512_mul_ps(a, scale), T::load(weight + i, lanes));
      b = _mm512_mul_ps(_mm512_mul_ps(b, scale), T::load(weight + half + i, lanes));
    }
    const __m512 c = _mm512_maskz_loadu_ps(lanes, cos + i);
    const __m512 s = _mm512_maskz_loadu_ps(lanes, sin + i);
    T::store(out + i, lanes, _mm512_fmsub_ps(a, c, _mm512_mul_ps(b, s)));
    T::store(out + half + i, lanes, _mm512_fmadd_ps(b, c, _mm512_mul_ps(a, s)));
  }
}

template <class T>
void rope_write(const TandemStep* step, const TandemPool* pool, long layer_index,
                typename T::Element* qkv, long num_heads, const float* cos, const float* sin,
                const typename T::Element* query_norm, const typename T::Element* key_norm,
                float eps, int threads) {
  const Layer layer(*pool, layer_index);
  const long head_dim = pool->head_dim, kv_heads = pool->kv_heads;
  const long stride = (num_heads + 2 * kv_heads) * head_dim;
  auto* base = static_cast<typename T::Element*>(pool->base);
  for (long seq = 0; seq < step->num_seqs; ++seq) {
    const long begin = step->first_rows[seq], end = step->first_rows[seq + 1];
    const int32_t* blocks = step->blocks + seq * step->max_blocks;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && end - begin > 8)
    for (long row = begin; row < end; ++row) {
      auto* x = qkv + row * stride;
      const float *c = cos + row * (head_dim / 2), *s = sin + row * (head_dim / 2);
      for (long head = 0; head < num_heads; ++head, x += head_dim)
        turn<T>(x, c, s, query_norm, eps, head_dim, x);
      if (layer.fp8) {
        auto* to = static_cast<uint8_t*>(pool->base) +
                   layer.offset(blocks, step->starts[seq] + row - begin);
        for (long head = 0; head < kv_heads; ++head, x += head_dim) {
          turn<T>(x, c, s, key_norm, eps, head_dim, x);
          encode_head<T>(x, head_dim, to + head * layer.width);
        }
        for (long head = 0; head < kv_heads; ++head, x += head_dim)
          encode_head<T>(x, head_dim, to + layer.half + head * layer.width);
        continue;
      }
      auto* to = base + layer.offset(blocks, step->starts[seq] + row - begin);
      for (long head = 0; head < kv_heads; ++head, x += head_dim)
        turn<T>(x, c, s, key_norm, eps, head_dim, to + head * head_dim);
      std::memcpy(to + layer.half, x, size_t(layer.token) * sizeof(*x));
    }
  }
}

// Rows of a packed weight: the embedding table is the output projection's.
template <class T>
void unpack_rows(const int64_t* ids, const typename T::Word* weight, long count, long k,
                 typename T::Element* out) {
  const long words = (k + T::kPerWord - 1) / T::kPerWord;
  for (long i = 0; i < count; ++i) {
    const auto* from = weight + ids[i] / kPanel * words * kPanel + ids[i] % kPanel;
    for (long w = 0; w < words; ++w)
      std::memcpy(out + i * k + w * T::kPerWord, from + w * kPanel,
                  size_t(std::min<long>(T::kPerWord, k - w * T::kPerWord)) * sizeof(*out));
  }
}

}  // namespace
}  // namespace tandem

using namespace tandem;

extern "C" {

void tandem_norm_bf16(uint16_t* hidden, const uint16_t* delta, const uint16_t* weight,
                      uint16_t* out, long rows, long columns, float eps, int threads) {
  norm<Bf16>(hidden, delta, weight, out, rows, columns, eps, threads);
}

void tandem_norm_f32(float* hidden, const float* delta, const float* weight, float* out, long rows,
                     long columns, float eps, int threads) {
  norm<F32>(hidden, delta, weight, out, rows, columns, eps, threads);
}

void tandem_swiglu_bf16(const uint16_t* gate_up, uint16_t* out, long rows, long inner,
                        int threads) {
  swiglu<Bf16>(gate_up, out, rows, inner, threads);
}

void tandem_swiglu_f32(const float* gate_up, float* out, long rows, long inner, int threads) {
  swiglu<F32>(gate_up, out, rows, inner, threads);
}

void tandem_rope_write_bf16(const TandemStep* step, const TandemPool* pool, long layer,
                            uint16_t* qkv, long num_heads, const float* cos, const float* sin,
                            const uint16_t* query_norm, const uint16_t* key_norm, float eps,
                            int threads) {
  rope_write<Bf16>(step, pool, layer, qkv, num_heads, cos, sin, query_norm, key_norm, eps,
                   threads);
}

void tandem_rope_write_f32(const TandemStep* step, const TandemPool* pool, long layer, float* qkv,
                           long num_heads, const float* cos, const float* sin,
                           const float* query_norm, const float* key_norm, float eps,
                           int threads) {
  rope_write<F32>(step, pool, layer, qkv, num_heads, cos, sin, query_norm, key_norm, eps, threads);
}

void tandem_unpack_rows_bf16(const int64_t* ids, const uint32_t* weight, long count, long k,
                             uint16_t* out) {
  unpack_rows<Bf16>(ids, weight, count, k, out);
}

void tandem_unpack_rows_f32(const int64_t* ids, const float* weight, long count, long k,
                            float* out) {
  unpack_rows<F32>(ids, weight, count, k, out);
}
}
