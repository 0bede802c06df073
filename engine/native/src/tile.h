// The inner loop of every matrix product: R rows by V vectors of sums that stay in registers.
#pragma once

#include <algorithm>

#include "numeric.h"

namespace tandem {

// 14 rows by 2 vectors: 28 sums, 2 vectors of the right operand and 2 spare registers.
constexpr int kMaxRows = 14;
constexpr int kPanel = 2 * kLanes;

// Adds a · b. `a` has word w of row r at a[w * WordStride + r * RowStride], `b` has word w of its
// V * 16 columns at b[w * b_stride]. Each sum is one chain in the order of the words, so it does
// not depend on R, V or on what else is in the batch.
template <class T, int R, int V, int WordStride, int RowStride>
inline __attribute__((always_inline)) void multiply(__m512 (&sums)[R][V],
                                                    const typename T::Word* a,
                                                    const typename T::Word* b, long b_stride,
                                                    long words) {
  for (long w = 0; w < words; ++w) {
    __m512i right[V];
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) right[v] = _mm512_loadu_si512(b + v * kLanes);
#pragma GCC unroll 14
    for (int r = 0; r < R; ++r) {
      const __m512i left = T::spread(a[r * RowStride]);
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) sums[r][v] = T::dot(sums[r][v], left, right[v]);
    }
    a += WordStride;
    b += b_stride;
  }
}

// Rows in blocks of nearly equal size, none above kMaxRows.
struct RowBlocks {
  long rows, count;
  explicit RowBlocks(long rows) : rows(rows), count((rows + kMaxRows - 1) / kMaxRows) {}
  long begin(long block) const { return rows * block / count; }
};

// [rows][k] to row blocks of [words][rows of the block]; an odd k ends in half a word of zero.
template <class T>
inline void pack_rows(const typename T::Element* a, long stride, long k, RowBlocks blocks,
               typename T::Word* out) {
  using Word = typename T::Word;
  const long words = (k + T::kPerWord - 1) / T::kPerWord;
  for (long block = 0; block < blocks.count; ++block) {
    const long begin = blocks.begin(block), rows = blocks.begin(block + 1) - begin;
    Word* to = out + begin * words;
    for (long r = 0; r < rows; ++r) {
      const typename T::Element* row = a + (begin + r) * stride;
      for (long w = 0; w < k / T::kPerWord; ++w)
        std::memcpy(to + w * rows + r, row + w * T::kPerWord, sizeof(Word));
      if (k % T::kPerWord) to[(words - 1) * rows + r] = Word(row[k - 1]);
    }
  }
}

// A panel's sums, [count][2] vectors, to its columns of `c`, with the bias where there is one.
template <class T, class Out>
inline void store_panel(const __m512* sums, const typename T::Element* bias,
                        typename Out::Element* c, long c_stride, long count, long panel, long n) {
  for (long v = 0; v < 2; ++v) {
    const long column = panel * kPanel + v * kLanes;
    if (column >= n) break;
    const __mmask16 lanes = first_lanes(n - column);
    const __m512 extra = bias ? T::load(bias + column, lanes) : _mm512_setzero_ps();
    for (long r = 0; r < count; ++r)
      Out::store(c + r * c_stride + column, lanes, _mm512_add_ps(sums[2 * r + v], extra));
  }
}

}  // namespace tandem
