// The two number types of the kernels, as 512-bit vectors see them.
//
// Both are read and written as their own type and computed in float32. A "word" is what one
// vector lane holds of a matrix operand: two neighbouring bfloat16 numbers along the dimension
// that is summed, or one float32. `dot` adds the product of two words to a float32 lane.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace tandem {

constexpr int kLanes = 16;

inline __mmask16 first_lanes(long count) {
  return count >= kLanes ? __mmask16(0xffff) : __mmask16((1u << count) - 1);
}

inline long round_up(long value, long multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

struct Bf16 {
  using Element = uint16_t;
  using Word = uint32_t;
  static constexpr int kPerWord = 2;

  static __m512 dot(__m512 sum, __m512i a, __m512i b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
  }
  static __m512i spread(Word word) { return _mm512_set1_epi32(int(word)); }
  static __m512 load(const Element* from, __mmask16 lanes) {
    const __m256i raw = _mm256_maskz_loadu_epi16(lanes, from);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
  }
  static void store(Element* to, __mmask16 lanes, __m512 values) {
    _mm256_mask_storeu_epi16(to, lanes, (__m256i)_mm512_cvtneps_pbh(values));
  }
};

struct F32 {
  using Element = float;
  using Word = float;
  static constexpr int kPerWord = 1;

  static __m512 dot(__m512 sum, __m512i a, __m512i b) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum);
  }
  static __m512i spread(Word word) { return _mm512_castps_si512(_mm512_set1_ps(word)); }
  static __m512 load(const Element* from, __mmask16 lanes) {
    return _mm512_maskz_loadu_ps(lanes, from);
  }
  static void store(Element* to, __mmask16 lanes, __m512 values) {
    _mm512_mask_storeu_ps(to, lanes, values);
  }
};

// 2^x to about 2 ulp; 0 for x = -inf. The fraction, in [-0.5, 0.5], goes through its Taylor series.
inline __m512 exp2(__m512 x) {
  x = _mm512_max_ps(x, _mm512_set1_ps(-150.0f));
  const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 f = _mm512_sub_ps(x, whole);
  __m512 y = _mm512_set1_ps(1.5403530e-4f);
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.3333558e-3f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(9.6181291e-3f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(5.5504109e-2f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(2.4022651e-1f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(6.9314718e-1f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(y, whole);
}

constexpr float kLog2E = 1.44269504088896340736f;

// Memory that a thread takes once and keeps, aligned to a cache line. It grows and never shrinks.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  ~Scratch() { _mm_free(memory_); }

  template <class T>
  T* take(long count) {
    const long bytes = round_up(count * long(sizeof(T)), 64);
    if (bytes > size_) {
      _mm_free(memory_);
      memory_ = _mm_malloc(size_t(bytes), 64);
      size_ = memory_ ? bytes : 0;
    }
    return static_cast<T*>(memory_);
  }

 private:
  void* memory_ = nullptr;
  long size_ = 0;
};

}  // namespace tandem
