// KV heads in FP8, as engine/fp8_kv.py defines them: e4m3 numbers, and their scale behind them.
#pragma once

#include <algorithm>

#include "numeric.h"

namespace tandem {

// `head` [head_dim] as it is stored, uint8 [head_dim + 4].
template <class T>
void encode_head(const typename T::Element* head, long head_dim, uint8_t* to) {
  const __m512i low = _mm512_set1_epi32(0x7fffffff);
  const auto magnitude = [&](__m512 x) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), low));
  };
  __m512 top = _mm512_setzero_ps();
  for (long i = 0; i < head_dim; i += kLanes)
    top = _mm512_max_ps(magnitude(T::load(head + i, first_lanes(head_dim - i))), top);
  const float largest = _mm512_reduce_max_ps(top);
  const float scale = largest > 0 ? std::max(largest / 448.0f, 0x1p-126f) : 1.0f;
  for (long i = 0; i < head_dim; i += kLanes) {
    const __mmask16 lanes = first_lanes(head_dim - i);
    const __m512 x = _mm512_div_ps(T::load(head + i, lanes), _mm512_set1_ps(scale));
    const __m512 size = _mm512_min_ps(magnitude(x), _mm512_set1_ps(448.0f));
    const __m512i bits = _mm512_castps_si512(size);
    // From 2^-6 on a number has its own exponent, whose bias goes from 127 to 7; ties to even.
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 20), _mm512_set1_epi32(1));
    const __m512i rounded =
        _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7ffff)));
    __m512i code =
        _mm512_sub_epi32(_mm512_srli_epi32(rounded, 20), _mm512_set1_epi32(120 << 3));
    // Below, the sum's last bits count steps of 2^-9.
    const __m512i steps = _mm512_and_si512(
        _mm512_castps_si512(_mm512_add_ps(size, _mm512_set1_ps(16384.0f))),
        _mm512_set1_epi32(0xff));
    const __mmask16 small = _mm512_cmp_ps_mask(size, _mm512_set1_ps(0x1p-6f), _CMP_LT_OQ);
    code = _mm512_mask_mov_epi32(code, small, steps);
    const __mmask16 odd_one = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    code = _mm512_mask_mov_epi32(code, odd_one, _mm512_set1_epi32(0x7f));
    const __m512i sign =
        _mm512_slli_epi32(_mm512_srli_epi32(_mm512_castps_si512(x), 31), 7);
    _mm_mask_storeu_epi8(to + i, lanes, _mm512_cvtepi32_epi8(_mm512_or_si512(code, sign)));
  }
  std::memcpy(to + head_dim, &scale, sizeof scale);
}

// The same turned around, each product rounded once.
template <class T>
void decode_head(const uint8_t* from, long head_dim, typename T::Element* head) {
  float scale;
  std::memcpy(&scale, from + head_dim, sizeof scale);
  for (long i = 0; i < head_dim; i += kLanes) {
    const __mmask16 lanes = first_lanes(head_dim - i);
    const __m512i code = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(lanes, from + i));
    const __m512i low = _mm512_and_si512(code, _mm512_set1_epi32(0x7f));
    const __m512i normal =
        _mm512_add_epi32(_mm512_slli_epi32(low, 20), _mm512_set1_epi32(120 << 23));
    const __m512 steps = _mm512_mul_ps(_mm512_cvtepi32_ps(low), _mm512_set1_ps(0x1p-9f));
    const __mmask16 small = _mm512_cmplt_epi32_mask(low, _mm512_set1_epi32(8));
    __m512i bits = _mm512_mask_mov_epi32(normal, small, _mm512_castps_si512(steps));
    const __mmask16 nan = _mm512_cmpeq_epi32_mask(low, _mm512_set1_epi32(0x7f));
    bits = _mm512_mask_mov_epi32(bits, nan, _mm512_set1_epi32(0x7fc00000));
    bits = _mm512_or_si512(bits, _mm512_slli_epi32(_mm512_srli_epi32(code, 7), 31));
    T::store(head + i, lanes, _mm512_mul_ps(_mm512_castsi512_ps(bits), _mm512_set1_ps(scale)));
  }
}

}  // namespace tandem
