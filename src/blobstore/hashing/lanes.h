// SHA-256 of N streams in the lanes of vectors. The file of a target includes this one, and defines
// `rotated`, `parity`, `choose` and `majority` for its vectors, since only some processors have one
// instruction for each.
//
// Word t of all streams is one vector, so the rounds are written as for one stream. Blocks are
// loaded as they lie in memory, and transposed.
#pragma once

#include <cstring>
#include <utility>

#include "single.h"

namespace blobstore::hashing::BLOBSTORE_TARGET {

template <std::size_t N>
struct VectorOf {
  typedef std::uint32_t type __attribute__((vector_size(N * 4)));
  typedef std::uint8_t bytes __attribute__((vector_size(N * 4)));
};
template <std::size_t N>
using Words = typename VectorOf<N>::type;

template <std::size_t N, std::size_t... i>
inline Words<N> from_big_endian(Words<N> words, std::index_sequence<i...>) {
  const auto bytes = __builtin_bit_cast(typename VectorOf<N>::bytes, words);
  return __builtin_bit_cast(Words<N>, __builtin_shufflevector(bytes, bytes, (i ^ 3)...));
}

// Of each pair of squares of `half` lanes, the first (second) one of `a`, then that of `b`.
template <std::size_t N, std::size_t half, bool second, std::size_t... i>
inline Words<N> squares(Words<N> a, Words<N> b, std::index_sequence<i...>) {
  return __builtin_shufflevector(
      a, b, ((i & ~half) + (second ? half : 0) + (i & half ? N : 0))...);
}

// Exchanges the squares off the diagonal, of ever larger size: rows become columns.
template <std::size_t N, std::size_t half = 1>
inline void transpose(Words<N> (&rows)[N]) {
  if constexpr (half < N) {
    using Order = std::make_index_sequence<N>;
    for (std::size_t i = 0; i < N; ++i) {
      if (i & half) continue;
      const Words<N> upper = rows[i], lower = rows[i + half];
      rows[i] = squares<N, half, false>(upper, lower, Order());
      rows[i + half] = squares<N, half, true>(upper, lower, Order());
    }
    transpose<N, half * 2>(rows);
  }
}

// Word t of the blocks of all streams is w[t].
template <std::size_t N>
inline void load_blocks(const std::uint8_t* const (&data)[N], Words<N> (&w)[16]) {
  for (std::size_t part = 0; part < 16; part += N) {
    Words<N> rows[N];
    for (std::size_t lane = 0; lane < N; ++lane) {
      std::memcpy(&rows[lane], data[lane] + 4 * part, sizeof rows[lane]);
    }
    transpose<N>(rows);
    for (std::size_t t = 0; t < N; ++t) {
      w[part + t] = from_big_endian<N>(rows[t], std::make_index_sequence<4 * N>());
    }
  }
}

template <typename W>
inline W big_sigma0(W x) { return parity(rotated<2>(x), rotated<13>(x), rotated<22>(x)); }
template <typename W>
inline W big_sigma1(W x) { return parity(rotated<6>(x), rotated<11>(x), rotated<25>(x)); }
template <typename W>
inline W small_sigma0(W x) { return parity(rotated<7>(x), rotated<18>(x), W(x >> 3)); }
template <typename W>
inline W small_sigma1(W x) { return parity(rotated<17>(x), rotated<19>(x), W(x >> 10)); }

// Word t of the message schedule, t >= 16; w holds the last sixteen.
template <std::size_t t, typename W>
inline void next_word(W (&w)[16]) {
  w[t % 16] += small_sigma0(w[(t + 1) % 16]) + w[(t + 9) % 16] + small_sigma1(w[(t + 14) % 16]);
}

// Round t. The letters move by one name a round instead of from variable to variable: `v` holds a
// to h, and a is v[-t mod 8].
template <std::size_t t, typename W>
inline void round_of(W (&v)[8], W (&w)[16]) {
  W &a = v[(64 - t) % 8], &b = v[(65 - t) % 8], &c = v[(66 - t) % 8], &d = v[(67 - t) % 8];
  W &e = v[(68 - t) % 8], &f = v[(69 - t) % 8], &g = v[(70 - t) % 8], &h = v[(71 - t) % 8];
  if constexpr (t >= 16) next_word<t>(w);
  h += (w[t % 16] + round_constants[t]) + choose(e, f, g) + big_sigma1(e);
  d += h;
  h += majority(a, b, c) + big_sigma0(a);
}

template <typename W, std::size_t... t>
inline void rounds(W (&v)[8], W (&w)[16], std::index_sequence<t...>) {
  (round_of<t>(v, w), ...);
}

template <std::size_t N>
void advance(const Run* const* runs, std::size_t count, std::size_t blocks) {
  using W = Words<N>;
  const std::uint8_t* data[N];
  W state[8], w[16], v[8];
  for (std::size_t lane = 0; lane < N; ++lane) {
    const Run& run = *runs[lane < count ? lane : 0];  // an idle lane repeats the first stream
    data[lane] = run.data;
    for (std::size_t i = 0; i < 8; ++i) state[i][lane] = run.state[i];
  }
  for (; blocks > 0; --blocks) {
    load_blocks<N>(data, w);
    for (auto& at : data) at += block_size;
    std::memcpy(v, state, sizeof v);
    rounds(v, w, std::make_index_sequence<64>());
    for (std::size_t i = 0; i < 8; ++i) state[i] += v[i];
  }
  for (std::size_t lane = 0; lane < count; ++lane) {
    for (std::size_t i = 0; i < 8; ++i) runs[lane]->state[i] = state[i][lane];
  }
}

// The words of N blocks of one stream, which do not depend on its state.
template <typename W, std::size_t... t>
inline void all_words(W (&w)[16], W (&words)[64], std::index_sequence<t...>) {
  const auto word = [&]<std::size_t i>(std::integral_constant<std::size_t, i>) {
    if constexpr (i >= 16) next_word<i>(w);
    words[i] = w[i % 16] + round_constants[i];
  };
  (word(std::integral_constant<std::size_t, t>()), ...);
}

template <std::size_t N>
struct LaneSchedule {
  const Words<N>* words;
  std::size_t lane;

  template <std::size_t t>
  Word word() const {
    Word found;
    std::memcpy(&found, reinterpret_cast<const char*>(words + t) + 4 * lane, sizeof found);
    return found;
  }
};

// One stream: the words of N blocks are computed in lanes, then the rounds one after the other.
template <std::size_t N>
void advance_single(const Run* const* runs, std::size_t, std::size_t blocks) {
  const std::uint8_t* from = runs[0]->data;
  Words<N> w[16], words[64];
  while (blocks > 0) {
    const std::size_t count = blocks < N ? blocks : N;
    const std::uint8_t* data[N];
    for (std::size_t lane = 0; lane < N; ++lane) {
      data[lane] = from + block_size * (lane < count ? lane : 0);
    }
    load_blocks<N>(data, w);
    all_words(w, words, std::make_index_sequence<64>());
    for (std::size_t lane = 0; lane < count; ++lane) {
      hash_block(runs[0]->state, LaneSchedule<N>{words, lane});
    }
    from += block_size * count;
    blocks -= count;
  }
}

}  // namespace blobstore::hashing::BLOBSTORE_TARGET
