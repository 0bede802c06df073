// Causal attention over the paged pool, for single tokens and prompt chunks alike.
//
// Flash attention (Dao et al., https://arxiv.org/abs/2205.14135): keys come in tiles of 64, the
// softmax is kept running in float32. Tiles lie at multiples of 64 positions, and a row's
// arithmetic never depends on which rows are computed beside it; so a token's result has the same
// bits in whatever chunk and batch it is computed.
//
// Slots that the sequence has not written are never read.

#include <algorithm>
#include <vector>

#include "fp8.h"
#include "step.h"
#include "tile.h"

namespace tandem {
namespace {

constexpr long kTile = 64;        // keys
constexpr long kQueryRows = 112;  // rows of one KV head that share a packed tile

// A part of the step: tokens of one sequence and KV heads that one thread computes.
struct Item {
  long seq, first, count;  // tokens, counted within the sequence's part of the step
  long head_begin, head_end;
};

template <class T>
struct Inputs {
  const TandemStep& step;
  Layer layer;
  const char* pool;
  const typename T::Element* query;
  typename T::Element* out;
  long query_stride, out_stride;
  long group;  // query heads that share a KV head
  float scale;
};

// Where the keys of one tile lie.
struct TileKeys {
  long count = 0;
  long offsets[kTile];

  void find(const Layer& layer, const TandemStep& step, const Item& item, long tile) {
    const long end = step.starts[item.seq] + item.first + item.count;
    const long begin = tile * kTile;
    count = std::clamp<long>(end - begin, 0, kTile);
    const int32_t* blocks = step.blocks + item.seq * step.max_blocks;
    for (long i = 0; i < count; ++i) offsets[i] = layer.offset(blocks, begin + i);
  }
};

// Sixteen words of sixteen keys, turned around: out[w] has word w of every key. Each key comes in
// four parts of four words, straight from memory to where two rounds of unpacking need it.
inline void transpose(const void* const (&keys)[kLanes], __m512i (&out)[kLanes]) {
  const auto part = [&](int key, int quarter) {
    return _mm_loadu_si128(static_cast<const __m128i*>(keys[key]) + quarter);
  };
#pragma GCC unroll 4
  for (int q = 0; q < 4; ++q) {
    __m512i a[4];
#pragma GCC unroll 4
    for (int m = 0; m < 4; ++m) {
      a[m] = _mm512_castsi128_si512(part(m, q));
      a[m] = _mm512_inserti32x4(a[m], part(4 + m, q), 1);
      a[m] = _mm512_inserti32x4(a[m], part(8 + m, q), 2);
      a[m] = _mm512_inserti32x4(a[m], part(12 + m, q), 3);
    }
    const __m512i low = _mm512_unpacklo_epi32(a[0], a[1]), low2 = _mm512_unpacklo_epi32(a[2], a[3]);
    const __m512i high = _mm512_unpackhi_epi32(a[0], a[1]),
                  high2 = _mm512_unpackhi_epi32(a[2], a[3]);
    out[4 * q] = _mm512_unpacklo_epi64(low, low2);
    out[4 * q + 1] = _mm512_unpackhi_epi64(low, low2);
    out[4 * q + 2] = _mm512_unpacklo_epi64(high, high2);
    out[4 * q + 3] = _mm512_unpackhi_epi64(high, high2);
  }
}

// Brings the keys and values of a tile into the cache, a few rows at each call, while another tile
// is computed. In the order of memory, so that the hardware sees streams.
class Fetcher {
 public:
  Fetcher(const char* pool, const TileKeys& keys, long half_bytes, long row_bytes, long element,
          long calls)
      : pool_(pool),
        keys_(keys),
        half_(half_bytes),
        bytes_(row_bytes),
        element_(element),
        share_((2 * keys.count + calls - 1) / calls) {}

  void call() {
    for (long i = 0; i < share_ && done_ < 2 * keys_.count; ++i, ++done_) {
      const long group = done_ / (2 * kLanes), within = done_ % (2 * kLanes);
      const long size = std::min<long>(kLanes, keys_.count - group * kLanes);
      const char* row = pool_ + keys_.offsets[group * kLanes + within % size] * element_;
      if (within >= size) row += half_;
      for (long line = 0; line < bytes_; line += 64) _mm_prefetch(row + line, _MM_HINT_T1);
    }
  }

 private:
  const char* pool_;
  const TileKeys& keys_;
  long half_, bytes_, element_, share_, done_ = 0;
};

// Keys to [words of D][64 keys].
template <class T>
void pack_keys(const typename T::Element* pool, const TileKeys& keys, long head_dim,
               typename T::Word* out, Fetcher& ahead) {
  const long words = head_dim / T::kPerWord;
  for (long group = 0; group < keys.count; group += kLanes) {
    for (long word = 0; word < words; word += kLanes) {
      // Where keys or words end within the sixteen, from a copy that ends in zeros.
      alignas(64) uint32_t copy[kLanes][kLanes];
      const void* rows[kLanes];
      const __mmask16 lanes = first_lanes(words - word);
      for (long i = 0; i < kLanes; ++i) {
        const bool there = group + i < keys.count;
        const auto* row =
            there ? pool + keys.offsets[group + i] + word * T::kPerWord : nullptr;
        rows[i] = row;
        if (!there || lanes != 0xffff) {
          const __m512i v =
              there ? _mm512_maskz_loadu_epi32(lanes, row) : _mm512_setzero_si512();
          _mm512_store_si512(copy[i], v);
          rows[i] = copy[i];
        }
      }
      __m512i v[kLanes];
      transpose(rows, v);
      for (long i = 0; i < std::min<long>(kLanes, words - word); ++i)
        _mm512_storeu_si512(out + (word + i) * kTile + group, v[i]);
      ahead.call();
    }
  }
}

// Values to [words of keys][width]. `width` is D rounded up to whole vectors.
void pack_values(const uint16_t* values, const TileKeys& keys, long head_dim, long width,
                 uint32_t* out, Fetcher& ahead) {
  alignas(64) static constexpr uint16_t kFirst[32] = {
      0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
      8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i first = _mm512_load_si512(kFirst);
  const __m512i second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
  for (long key = 0; key < keys.count; key += 2) {
    const uint16_t* even = values + keys.offsets[key];
    const uint16_t* odd = key + 1 < keys.count ? values + keys.offsets[key + 1] : nullptr;
    uint32_t* to = out + key / 2 * width;
    if (key % 8 == 0) ahead.call();
    for (long dim = 0; dim < head_dim; dim += 32) {
      const long left = head_dim - dim;
      const __mmask32 lanes = left >= 32 ? ~0u : (1u << left) - 1;
      const __m512i a = _mm512_maskz_loadu_epi16(lanes, even + dim);
      const __m512i b =
          odd ? _mm512_maskz_loadu_epi16(lanes, odd + dim) : _mm512_setzero_si512();
      _mm512_storeu_si512(to + dim, _mm512_permutex2var_epi16(a, first, b));
      if (left > 16) _mm512_storeu_si512(to + dim + 16, _mm512_permutex2var_epi16(a, second, b));
    }
  }
}

void pack_values(const float* values, const TileKeys& keys, long head_dim, long width, float* out,
                 Fetcher& ahead) {
  for (long key = 0; key < keys.count; ++key) {
    if (key % 8 == 0) ahead.call();
    for (long dim = 0; dim < head_dim; dim += kLanes)
      _mm512_storeu_ps(out + key * width + dim,
                       F32::load(values + keys.offsets[key] + dim, first_lanes(head_dim - dim)));
  }
}

// One head's keys, or values, of a tile in FP8, as elements one behind the other: [64][D].
template <class T>
void widen(const char* head, const TileKeys& keys, long head_dim, typename T::Element* out) {
  for (long key = 0; key < keys.count; ++key)
    decode_head<T>(reinterpret_cast<const uint8_t*>(head) + keys.offsets[key], head_dim,
                   out + key * head_dim);
}

// Rows of one block: their queries, and what the softmax has summed so far.
template <class T>
struct Rows {
  const typename T::Word* query;  // [words of D][rows]
  float* best;                    // [rows] the largest score, in powers of two
  float* total;                   // [rows][16] weights, summed by lane
  float* mixed;                   // [rows][width] values by weight
  long first;                     // of all rows of the item: row / group is its token
};

template <class T>
struct Tile {
  const typename T::Word* keys;    // [words of D][64]
  const typename T::Word* values;  // [words of keys][width]
  long words, width;
  long begin;    // position of the first key
  long visible;  // position behind the last key that token 0 of the item sees
  long group;
  float scale;
};

// One row's weights of one tile. Returns by how many powers of two the largest score has grown.
template <class T>
float weigh(const float* scores, long count, long seen, float scale, float* best, float* total,
            typename T::Element* weights) {
  __m512 s[kTile / kLanes];
  __m512 top = _mm512_set1_ps(*best);
  for (long v = 0; v < count; ++v) {
    const __mmask16 lanes = first_lanes(std::max<long>(0, seen - v * kLanes));
    s[v] = _mm512_mul_ps(_mm512_loadu_ps(scores + v * kLanes), _mm512_set1_ps(scale));
    s[v] = _mm512_mask_blend_ps(lanes, _mm512_set1_ps(-INFINITY), s[v]);
    top = _mm512_max_ps(s[v], top);
  }
  const float now = _mm512_reduce_max_ps(top);
  const float growth = *best - now;
  const __m512 shift = _mm512_set1_ps(now);
  const __m512 shrink = exp2(_mm512_set1_ps(growth));
  __m512 sum = _mm512_mul_ps(_mm512_loadu_ps(total), shrink);
  for (long v = 0; v < count; ++v) {
    const __mmask16 lanes = first_lanes(std::max<long>(0, seen - v * kLanes));
    const __m512 weight = _mm512_maskz_mov_ps(lanes, exp2(_mm512_sub_ps(s[v], shift)));
    T::store(weights + v * kLanes, 0xffff, weight);
    sum = _mm512_add_ps(sum, weight);
  }
  _mm512_storeu_ps(total, sum);
  *best = now;
  return _mm512_cvtss_f32(shrink);
}

template <class T, int R, int V>
void mix(const Rows<T>& rows, const Tile<T>& tile, const typename T::Word* weights, long words,
         const float* shrink, long column) {
  __m512 sums[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v)
      sums[r][v] = _mm512_mul_ps(
          _mm512_loadu_ps(rows.mixed + r * tile.width + column + v * kLanes),
          _mm512_set1_ps(shrink[r]));
  multiply<T, R, V, 1, kTile / T::kPerWord>(sums, weights, tile.values + column, tile.width,
                                            words);
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v)
      _mm512_storeu_ps(rows.mixed + r * tile.width + column + v * kLanes, sums[r][v]);
}

// One block of rows against one tile.
template <class T, int R>
void attend_block(const Rows<T>& rows, const Tile<T>& tile) {
  alignas(64) float scores[R * kTile];
  alignas(64) typename T::Word weights[R * kTile / T::kPerWord];
  float shrink[R];
  const auto seen = [&](long row) {
    return std::min(tile.visible + (rows.first + row) / tile.group - tile.begin, kTile);
  };
  const long most = seen(R - 1);
  if (most <= 0) return;
  for (long key = 0; key < most; key += kPanel) {
    __m512 sums[R][2];
    for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
    multiply<T, R, 2, R, 1>(sums, rows.query, tile.keys + key, kTile, tile.words);
    for (int r = 0; r < R; ++r) {
      _mm512_store_ps(scores + r * kTile + key, sums[r][0]);
      _mm512_store_ps(scores + r * kTile + key + kLanes, sums[r][1]);
    }
  }
  const long vectors = (most + kLanes - 1) / kLanes;
  for (int r = 0; r < R; ++r)
    shrink[r] = weigh<T>(
        scores + r * kTile, vectors, seen(r), tile.scale, rows.best + r, rows.total + r * kLanes,
        reinterpret_cast<typename T::Element*>(weights + r * kTile / T::kPerWord));
  const long words = (most + T::kPerWord - 1) / T::kPerWord;
  long column = 0;
  for (; column + kPanel <= tile.width; column += kPanel)
    mix<T, R, 2>(rows, tile, weights, words, shrink, column);
  if (column < tile.width) mix<T, R, 1>(rows, tile, weights, words, shrink, column);
}

template <class T>
using AttendBlock = void (*)(const Rows<T>&, const Tile<T>&);

template <class T>
constexpr AttendBlock<T> kAttendBlock[kMaxRows + 1] = {
    nullptr,
    attend_block<T, 1>,  attend_block<T, 2>,  attend_block<T, 3>,  attend_block<T, 4>,
    attend_block<T, 5>,  attend_block<T, 6>,  attend_block<T, 7>,  attend_block<T, 8>,
    attend_block<T, 9>,  attend_block<T, 10>, attend_block<T, 11>, attend_block<T, 12>,
    attend_block<T, 13>, attend_block<T, 14>,
};

template <class T>
void attend_item(const Inputs<T>& in, const Item& item, const Item* following) {
  using Word = typename T::Word;
  using Element = typename T::Element;
  static thread_local Scratch word_scratch, float_scratch, wide_scratch;
  const long head_dim = in.layer.head_dim, words = head_dim / T::kPerWord;
  const long width = round_up(head_dim, kLanes);
  const long heads = item.head_end - item.head_begin;
  const RowBlocks blocks(item.count * in.group);
  const long rows = blocks.rows;

  Word* query = word_scratch.take<Word>(heads * rows * words + kTile * (words + width));
  Word* keys = query + heads * rows * words;
  Word* values = keys + kTile * words;
  float* best = float_scratch.take<float>(heads * rows * (1 + kLanes + width));
  float* total = best + heads * rows;
  float* mixed = total + heads * rows * kLanes;
  std::fill(best, total, -INFINITY);
  std::fill(total, mixed + heads * rows * width, 0.0f);

  const long first_row = in.step.first_rows[item.seq] + item.first;
  const auto element = [&](long row, long head, long stride) {
    return (first_row + row / in.group) * stride + (head * in.group + row % in.group) * head_dim;
  };
  for (long head = 0; head < heads; ++head)
    for (long block = 0; block < blocks.count; ++block) {
      const long begin = blocks.begin(block), count = blocks.begin(block + 1) - begin;
      for (long row = begin; row < begin + count; ++row) {
        const auto* from = in.query + element(row, item.head_begin + head, in.query_stride);
        Word* to = query + (head * rows + begin) * words + (row - begin);
        for (long w = 0; w < words; ++w)
          std::memcpy(to + w * count, from + w * T::kPerWord, sizeof(Word));
      }
    }

  // Of what the pool's offsets count, in bytes.
  const long unit = in.layer.fp8 ? 1 : sizeof(Element);
  Element* wide = in.layer.fp8 ? wide_scratch.take<Element>(2 * kTile * head_dim) : nullptr;
  TileKeys here, next, flat;
  for (long key = 0; key < kTile; ++key) flat.offsets[key] = key * head_dim;
  const long visible = in.step.starts[item.seq] + item.first + 1;
  const long tiles = (visible + item.count - 1 + kTile - 1) / kTile;
  here.find(in.layer, in.step, item, 0);
  for (long t = 0; t < tiles; ++t) {
    next.count = 0;
    if (t + 1 < tiles)
      next.find(in.layer, in.step, item, t + 1);
    else if (following)
      next.find(in.layer, in.step, *following, 0);
    const long chunks = (words + kLanes - 1) / kLanes, groups = (here.count + kLanes - 1) / kLanes;
    const char* first_head = in.pool + item.head_begin * in.layer.width * unit;
    Fetcher ahead(first_head, next, in.layer.half * unit, heads * in.layer.width * unit,
                  unit, heads * (chunks * groups + (here.count + 7) / 8));
    for (long head = 0; head < heads; ++head) {
      const char* at = first_head + head * in.layer.width * unit;
      if (in.layer.fp8) {
        flat.count = here.count;
        widen<T>(at, here, head_dim, wide);
        widen<T>(at + in.layer.half, here, head_dim, wide + kTile * head_dim);
        pack_keys<T>(wide, flat, head_dim, keys, ahead);
        pack_values(wide + kTile * head_dim, flat, head_dim, width, values, ahead);
      } else {
        const auto* pool = reinterpret_cast<const Element*>(at);
        pack_keys<T>(pool, here, head_dim, keys, ahead);
        pack_values(pool + in.layer.half, here, head_dim, width, values, ahead);
      }
      const Tile<T> tile{keys,    values,   words,
                         width,   t * kTile, visible,
                         in.group, in.scale * kLog2E};
      for (long block = 0; block < blocks.count; ++block) {
        const long row = head * rows + blocks.begin(block);
        kAttendBlock<T>[blocks.begin(block + 1) - blocks.begin(block)](
            {query + row * words, best + row, total + row * kLanes, mixed + row * width,
             blocks.begin(block)},
            tile);
      }
    }
    here = next;
  }

  for (long head = 0; head < heads; ++head)
    for (long row = 0; row < rows; ++row) {
      const long at = head * rows + row;
      const __m512 scale =
          _mm512_set1_ps(1.0f / _mm512_reduce_add_ps(_mm512_loadu_ps(total + at * kLanes)));
      auto* to = in.out + element(row, item.head_begin + head, in.out_stride);
      for (long dim = 0; dim < head_dim; dim += kLanes)
        T::store(to + dim, first_lanes(head_dim - dim),
                 _mm512_mul_ps(_mm512_loadu_ps(mixed + at * width + dim), scale));
    }
}

template <class T>
void attend(const TandemStep* step, const TandemPool* pool, long layer,
            const typename T::Element* query, long query_stride, typename T::Element* out,
            long out_stride, long num_heads, float scale, int threads) {
  const Inputs<T> in{*step,
                     Layer(*pool, layer),
                     static_cast<const char*>(pool->base),
                     query,
                     out,
                     query_stride,
                     out_stride,
                     num_heads / pool->kv_heads,
                     scale};
  const long tokens = std::max<long>(1, kQueryRows / in.group);
  std::vector<Item> items;
  for (long seq = 0; seq < step->num_seqs; ++seq) {
    const long count = step->first_rows[seq + 1] - step->first_rows[seq];
    // A single token takes all heads of a tile in one go, in the order of memory.
    const long heads = count == 1 && step->num_seqs >= threads ? pool->kv_heads : 1;
    for (long head = 0; head < pool->kv_heads; head += heads)
      for (long first = 0; first < count; first += tokens)
        items.push_back({seq, first, std::min(tokens, count - first), head,
                         std::min(head + heads, pool->kv_heads)});
  }
  const long count = long(items.size());
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
  for (long i = 0; i < count; ++i)
    attend_item<T>(in, items[i], i + threads < count ? &items[i + threads] : nullptr);
}

}  // namespace
}  // namespace tandem

using namespace tandem;

extern "C" {

void tandem_attend_bf16(const TandemStep* step, const TandemPool* pool, long layer,
                        const uint16_t* query, long query_stride, uint16_t* out, long out_stride,
                        long num_heads, float scale, int threads) {
  attend<Bf16>(step, pool, layer, query, query_stride, out, out_stride, num_heads, scale, threads);
}

void tandem_attend_f32(const TandemStep* step, const TandemPool* pool, long layer,
                       const float* query, long query_stride, float* out, long out_stride,
                       long num_heads, float scale, int threads) {
  attend<F32>(step, pool, layer, query, query_stride, out, out_stride, num_heads, scale, threads);
}
}
