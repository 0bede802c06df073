// Matrix products of a few rows with weights that stay quantised: GGUF's groups of 32 along k, four
// or eight bits a weight, with a float16 scale and, for four bits, a float16 minimum.
//
// The codes become bfloat16 numbers, which hold them exactly, and go through the same products as
// in linear.cpp; scale and minimum are applied to each group's sum in float32. So no weight is
// ever rounded, and a third of the bytes are read. With more rows than a few, the work on each group
// outweighs that.
//
// Packed by panels of 32 outputs: [n / 32][k / 32] of
//   four bits:  32 scales, 32 minima, then for each half of the panel four times 64 bytes; lane j
//               of 16 bits has output j / 2, and in its i-th four bits the even (j even) or odd k
//               of word i of the four;
//   eight bits: 32 scales, then for each word and half 32 bytes: outputs 0 to 7, then 8 to 15,
//               even and odd k of each.
//
// Formats: block_q4_0, block_q4_1 and block_q8_0 of ggml,
// https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.

#include <algorithm>

#include "tile.h"

namespace tandem {
namespace {

constexpr long kGroup = 32;
constexpr long kWords = kGroup / 2;

// The numbers that engine/native/grouped.py gives.
enum Kind : int { kQ4_0 = 0, kQ4_1 = 1, kQ8_0 = 2 };

inline float from_half(uint16_t half) { return _cvtsh_ss(half); }
inline uint16_t to_half(float value) { return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT); }

inline __m512 halves(const uint8_t* from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

struct FourBits {
  static constexpr long kBytes = 2 * 64 + kWords * 32;  // of a group in a panel
  static constexpr bool kMinima = true;

  // Codes as bfloat16, [16 words][32 outputs].
  static void decode(const uint8_t* group, uint32_t* words) {
    // 0 to 15, twice: the lookup goes by five bits, of which the fifth is a neighbour's.
    alignas(64) static constexpr uint16_t kNumbers[32] = {
        0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120,
        0x4130, 0x4140, 0x4150, 0x4160, 0x4170, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0,
        0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};
    const __m512i numbers = _mm512_load_si512(kNumbers);
#pragma GCC unroll 2
    for (long half = 0; half < 2; ++half)
#pragma GCC unroll 4
      for (long four = 0; four < 4; ++four) {
        const __m512i codes = _mm512_loadu_si512(group + 128 + 256 * half + 64 * four);
        uint32_t* to = words + 4 * four * kPanel + kLanes * half;
        _mm512_store_si512(to, _mm512_permutexvar_epi16(codes, numbers));
        _mm512_store_si512(to + kPanel,
                           _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4), numbers));
        _mm512_store_si512(to + 2 * kPanel,
                           _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 8), numbers));
        _mm512_store_si512(to + 3 * kPanel,
                           _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 12), numbers));
      }
  }

  static long at(long out, long in) {
    const long word = in / 2;
    return 128 + 256 * (out / 16) + 64 * (word / 4) + 4 * (out % 16) + 2 * (in % 2) + word % 4 / 2;
  }
  static int shift(long in) { return in / 2 % 2 * 4; }
};

struct EightBits {
  static constexpr long kBytes = 64 + kWords * 64;
  static constexpr bool kMinima = false;

  static void decode(const uint8_t* group, uint32_t* words) {
    const auto part = [&](long at) {
      const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(group + 64 + at));
      return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(raw));
    };
#pragma GCC unroll 4
    for (long at = 0; at < kWords * 2; ++at)
      _mm512_store_si512(words + at * kLanes,
                         (__m512i)_mm512_cvtne2ps_pbh(part(32 * at + 16), part(32 * at)));
  }

  static long at(long out, long in) {
    return 64 + 64 * (in / 2) + 32 * (out / 16) + out % 16 / 8 * 16 + out % 8 * 2 + in % 2;
  }
};

// Rows of GGUF blocks to panels. n is a multiple of 32.
void pack(Kind kind, const uint8_t* rows, long n, long k, uint8_t* out) {
  const long groups = k / kGroup;
  const long block = kind == kQ4_0 ? 18 : kind == kQ4_1 ? 20 : 34;
  const long size = kind == kQ8_0 ? EightBits::kBytes : FourBits::kBytes;
  std::fill(out, out + n / kPanel * groups * size, 0);
  for (long row = 0; row < n; ++row)
    for (long g = 0; g < groups; ++g) {
      const uint8_t* from = rows + (row * groups + g) * block;
      uint8_t* to = out + (row / kPanel * groups + g) * size;
      const long column = row % kPanel;
      std::memcpy(to + 2 * column, from, 2);
      if (kind == kQ8_0) {
        for (long i = 0; i < kGroup; ++i) to[EightBits::at(column, i)] = from[2 + i];
        continue;
      }
      uint16_t least;
      std::memcpy(&least, from + (kind == kQ4_1 ? 2 : 0), 2);
      if (kind == kQ4_0) least = to_half(-8.0f * from_half(least));  // codes count from -8
      std::memcpy(to + 64 + 2 * column, &least, 2);
      const uint8_t* codes = from + (kind == kQ4_1 ? 4 : 2);
      for (long i = 0; i < kGroup; ++i) {
        const int code = i < 16 ? codes[i] & 15 : codes[i - 16] >> 4;
        to[FourBits::at(column, i)] |= uint8_t(code << FourBits::shift(i));
      }
    }
}

// The sum of every group of every row, [groups][rows] by row blocks, for the minima.
void sum_groups(const uint16_t* a, long stride, long groups, RowBlocks blocks, float* out) {
  for (long block = 0; block < blocks.count; ++block) {
    const long begin = blocks.begin(block), rows = blocks.begin(block + 1) - begin;
    for (long r = 0; r < rows; ++r)
      for (long g = 0; g < groups; ++g) {
        const uint16_t* from = a + (begin + r) * stride + g * kGroup;
        out[begin * groups + g * rows + r] = _mm512_reduce_add_ps(
            _mm512_add_ps(Bf16::load(from, 0xffff), Bf16::load(from + kLanes, 0xffff)));
      }
  }
}

template <class Format, int R>
void panel_rows(const uint32_t* rows, const float* row_sums, const uint8_t* group, long groups,
                __m512* out) {
  alignas(64) uint32_t words[kWords * kPanel];
  for (int i = 0; i < 2 * R; ++i) out[i] = _mm512_setzero_ps();
  for (long g = 0; g < groups; ++g, group += Format::kBytes) {
    const uint8_t* next = group + Format::kBytes * groups;  // the same group of the next panel
    for (long line = 0; line < Format::kBytes; line += 64)
      _mm_prefetch(reinterpret_cast<const char*>(next + line), _MM_HINT_T1);
    Format::decode(group, words);
    __m512 sums[R][2];
    for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
    multiply<Bf16, R, 2, R, 1>(sums, rows, words, kPanel, kWords);
    for (int v = 0; v < 2; ++v) {
      const __m512 scale = halves(group + 32 * v);
      const __m512 least = Format::kMinima ? halves(group + 64 + 32 * v) : _mm512_setzero_ps();
      for (int r = 0; r < R; ++r) {
        __m512 total = _mm512_fmadd_ps(sums[r][v], scale, out[2 * r + v]);
        if (Format::kMinima)
          total = _mm512_fmadd_ps(_mm512_set1_ps(row_sums[r]), least, total);
        out[2 * r + v] = total;
      }
    }
    rows += kWords * R;
    row_sums += R;
  }
}

using PanelRows = void (*)(const uint32_t*, const float*, const uint8_t*, long, __m512*);

template <class F>
constexpr PanelRows kPanelRows[kMaxRows + 1] = {
    nullptr,           panel_rows<F, 1>,  panel_rows<F, 2>,  panel_rows<F, 3>,  panel_rows<F, 4>,
    panel_rows<F, 5>,  panel_rows<F, 6>,  panel_rows<F, 7>,  panel_rows<F, 8>,  panel_rows<F, 9>,
    panel_rows<F, 10>, panel_rows<F, 11>, panel_rows<F, 12>, panel_rows<F, 13>, panel_rows<F, 14>,
};

template <class Format, class Out>
void linear(const uint16_t* a, long a_stride, const uint8_t* weight, const uint16_t* bias,
            typename Out::Element* c, long c_stride, long rows, long n, long k, int threads) {
  static thread_local Scratch word_scratch, sum_scratch;
  const long groups = k / kGroup;
  const RowBlocks blocks(rows);
  uint32_t* packed = word_scratch.take<uint32_t>(rows * k / 2);
  float* row_sums = sum_scratch.take<float>(rows * groups);
  pack_rows<Bf16>(a, a_stride, k, blocks, packed);
  sum_groups(a, a_stride, groups, blocks, row_sums);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (long panel = 0; panel < n / kPanel; ++panel)
    for (long block = 0; block < blocks.count; ++block) {
      const long begin = blocks.begin(block), count = blocks.begin(block + 1) - begin;
      __m512 sums[kMaxRows * 2];
      kPanelRows<Format>[count](packed + begin * k / 2, row_sums + begin * groups,
                                weight + panel * groups * Format::kBytes, groups, sums);
      store_panel<Bf16, Out>(sums, bias, c + begin * c_stride, c_stride, count, panel, n);
    }
}

}  // namespace
}  // namespace tandem

using namespace tandem;

extern "C" {

void tandem_pack_grouped(int kind, const uint8_t* rows, long n, long k, uint8_t* out) {
  pack(Kind(kind), rows, n, k, out);
}

void tandem_linear_grouped(int kind, const uint16_t* a, long a_stride, const uint8_t* weight,
                           const uint16_t* bias, void* c, long c_stride, long rows, long n, long k,
                           int wide, int threads) {
  const auto call = [&](auto format, auto out) {
    using Out = decltype(out);
    linear<decltype(format), Out>(a, a_stride, weight, bias,
                                  static_cast<typename Out::Element*>(c), c_stride, rows, n, k,
                                  threads);
  };
  if (kind == kQ8_0)
    wide ? call(EightBits(), F32()) : call(EightBits(), Bf16());
  else
    wide ? call(FourBits(), F32()) : call(FourBits(), Bf16());
}
}
