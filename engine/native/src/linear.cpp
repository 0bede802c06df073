// Matrix products with packed weights: c = a · wᵀ + bias.
//
// A weight [n, k] is packed once, by panels of 32 outputs: [n / 32][words of k][32]. A panel is
// then one stretch of memory that streams once per call, however many rows there are.

#include <algorithm>

#include "tile.h"

namespace tandem {
namespace {

template <class T>
struct Product {
  using Word = typename T::Word;
  const Word* rows;   // row blocks one after another, each [words][rows of the block]
  const Word* panel;  // [words][32]
  long words;
};

template <class T, int R>
void panel_rows(const Product<T>& p, const char* ahead, long ahead_step, __m512* out) {
  using Word = typename T::Word;
  __m512 sums[R][2];
  for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
  const Word* a = p.rows;
  const Word* b = p.panel;
  for (long w = 0; w < p.words; ++w) {
    for (long line = 0; line < ahead_step; line += 64) _mm_prefetch(ahead + line, _MM_HINT_T1);
    ahead += ahead_step;
    const __m512i b0 = _mm512_loadu_si512(b), b1 = _mm512_loadu_si512(b + kLanes);
#pragma GCC unroll 14
    for (int r = 0; r < R; ++r) {
      const __m512i left = T::spread(a[r]);
      sums[r][0] = T::dot(sums[r][0], left, b0);
      sums[r][1] = T::dot(sums[r][1], left, b1);
    }
    a += R;
    b += kPanel;
  }
#pragma GCC unroll 14
  for (int r = 0; r < R; ++r) {
    _mm512_storeu_ps(out + 2 * r, sums[r][0]);
    _mm512_storeu_ps(out + 2 * r + 1, sums[r][1]);
  }
}

template <class T>
using PanelRows = void (*)(const Product<T>&, const char*, long, __m512*);

template <class T>
constexpr PanelRows<T> kPanelRows[kMaxRows + 1] = {
    nullptr,           panel_rows<T, 1>,  panel_rows<T, 2>,  panel_rows<T, 3>,  panel_rows<T, 4>,
    panel_rows<T, 5>,  panel_rows<T, 6>,  panel_rows<T, 7>,  panel_rows<T, 8>,  panel_rows<T, 9>,
    panel_rows<T, 10>, panel_rows<T, 11>, panel_rows<T, 12>, panel_rows<T, 13>, panel_rows<T, 14>,
};

template <class T>
void pack_weight(const typename T::Element* weight, long n, long k, typename T::Word* out) {
  using Word = typename T::Word;
  const long words = (k + T::kPerWord - 1) / T::kPerWord;
  for (long row = 0; row < round_up(n, kPanel); ++row) {
    Word* to = out + row / kPanel * words * kPanel + row % kPanel;
    const typename T::Element* from = weight + row * k;
    for (long w = 0; w < words; ++w) {
      Word word = 0;
      const long left = std::min<long>(T::kPerWord, k - w * T::kPerWord);
      if (row < n) std::memcpy(&word, from + w * T::kPerWord, size_t(left) * sizeof(*from));
      to[w * kPanel] = word;
    }
  }
}

template <class T, class Out>
void linear(const typename T::Element* a, long a_stride, const typename T::Word* weight,
            const typename T::Element* bias, typename Out::Element* c, long c_stride, long rows,
            long n, long k, int threads) {
  using Word = typename T::Word;
  static thread_local Scratch scratch;
  const long words = (k + T::kPerWord - 1) / T::kPerWord;
  const RowBlocks blocks(rows);
  Word* packed = scratch.take<Word>(rows * words);
  pack_rows<T>(a, a_stride, k, blocks, packed);
  const long panels = (n + kPanel - 1) / kPanel;
  // While the rows of one panel are computed the next panel comes from memory, in the first two
  // passes over it or all of it in the only one.
  const long panel_bytes = words * kPanel * long(sizeof(Word));
  const long share = blocks.count == 1 ? 1 : 2;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (long panel = 0; panel < panels; ++panel) {
    const Word* b = weight + panel * words * kPanel;
    const char* next = reinterpret_cast<const char*>(b) + panel_bytes;
    for (long block = 0; block < blocks.count; ++block) {
      const long begin = blocks.begin(block), count = blocks.begin(block + 1) - begin;
      __m512 sums[kMaxRows * 2];
      const long step = block < share ? kPanel * long(sizeof(Word)) / share : 0;
      kPanelRows<T>[count]({packed + begin * words, b, words}, next + block * panel_bytes / share,
                           step, sums);
      store_panel<T, Out>(sums, bias, c + begin * c_stride, c_stride, count, panel, n);
    }
  }
}

}  // namespace
}  // namespace tandem

using namespace tandem;

extern "C" {

void tandem_pack_bf16(const uint16_t* weight, long n, long k, uint32_t* out) {
  pack_weight<Bf16>(weight, n, k, out);
}

void tandem_pack_f32(const float* weight, long n, long k, float* out) {
  pack_weight<F32>(weight, n, k, out);
}

void tandem_linear_bf16(const uint16_t* a, long a_stride, const uint32_t* weight,
                        const uint16_t* bias, uint16_t* c, long c_stride, long rows, long n,
                        long k, int threads) {
  linear<Bf16, Bf16>(a, a_stride, weight, bias, c, c_stride, rows, n, k, threads);
}

void tandem_linear_bf16_f32(const uint16_t* a, long a_stride, const uint32_t* weight,
                            const uint16_t* bias, float* c, long c_stride, long rows, long n,
                            long k, int threads) {
  linear<Bf16, F32>(a, a_stride, weight, bias, c, c_stride, rows, n, k, threads);
}

void tandem_linear_f32(const float* a, long a_stride, const float* weight, const float* bias,
                       float* c, long c_stride, long rows, long n, long k, int threads) {
  linear<F32, F32>(a, a_stride, weight, bias, c, c_stride, rows, n, k, threads);
}
}
