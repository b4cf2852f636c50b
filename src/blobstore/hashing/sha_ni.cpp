// Several streams with the SHA extensions of x86-64, interleaved: each instruction waits for the
// one before of its stream, and those of other streams fill the wait.
#include <immintrin.h>

#include <cstring>
#include <utility>

#include "sha256.h"

namespace blobstore::hashing {
namespace {

// The instructions hold the state as (a, b, e, f) and (c, d, g, h), from the highest word down
// (Intel SDM, SHA256RNDS2).
struct State {
  __m128i abef, cdgh;
};

inline State packed(const std::uint32_t* state) {
  const __m128i dcba = _mm_loadu_si128(reinterpret_cast<const __m128i*>(state));
  const __m128i hgfe = _mm_loadu_si128(reinterpret_cast<const __m128i*>(state + 4));
  const __m128i cdab = _mm_shuffle_epi32(dcba, 0xb1), efgh = _mm_shuffle_epi32(hgfe, 0x1b);
  return {_mm_alignr_epi8(cdab, efgh, 8), _mm_blend_epi16(efgh, cdab, 0xf0)};
}

inline void unpack(State from, std::uint32_t* state) {
  const __m128i feba = _mm_shuffle_epi32(from.abef, 0x1b);
  const __m128i dchg = _mm_shuffle_epi32(from.cdgh, 0xb1);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state), _mm_blend_epi16(feba, dchg, 0xf0));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state + 4), _mm_alignr_epi8(dchg, feba, 8));
}

inline __m128i load_words(const std::uint8_t* from) {
  const __m128i order = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
  return _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)), order);
}

// Rounds 4 i to 4 i + 3 of each stream; w holds its last sixteen words, four a vector.
template <std::size_t i, std::size_t S>
inline void four_rounds(State (&v)[S], __m128i (&w)[S][4], const std::uint8_t* const (&data)[S]) {
  const __m128i constants =
      _mm_loadu_si128(reinterpret_cast<const __m128i*>(round_constants + 4 * i));
  __m128i sum[S];
  for (std::size_t s = 0; s < S; ++s) {
    __m128i& now = w[s][i % 4];
    if constexpr (i < 4) {
      now = load_words(data[s] + 16 * i);
    } else {
      const __m128i before = w[s][(i + 3) % 4];
      const __m128i ninth = _mm_alignr_epi8(before, w[s][(i + 2) % 4], 4);
      now = _mm_sha256msg1_epu32(now, w[s][(i + 1) % 4]);
      now = _mm_sha256msg2_epu32(_mm_add_epi32(now, ninth), before);
    }
    sum[s] = _mm_add_epi32(now, constants);
  }
  for (std::size_t s = 0; s < S; ++s) {
    v[s].cdgh = _mm_sha256rnds2_epu32(v[s].cdgh, v[s].abef, sum[s]);
  }
  for (std::size_t s = 0; s < S; ++s) {
    v[s].abef = _mm_sha256rnds2_epu32(v[s].abef, v[s].cdgh, _mm_shuffle_epi32(sum[s], 0x0e));
  }
}

template <std::size_t S, std::size_t... i>
inline void rounds(State (&v)[S], __m128i (&w)[S][4], const std::uint8_t* const (&data)[S],
                   std::index_sequence<i...>) {
  (four_rounds<i>(v, w, data), ...);
}

template <std::size_t S>
void advance(const Run* const* runs, std::size_t count, std::size_t blocks) {
  const std::uint8_t* data[S];
  State state[S], v[S];
  __m128i w[S][4];
  for (std::size_t s = 0; s < S; ++s) {
    const Run& run = *runs[s < count ? s : 0];  // an idle place repeats the first stream
    data[s] = run.data;
    state[s] = packed(run.state);
  }
  for (; blocks > 0; --blocks) {
    for (std::size_t s = 0; s < S; ++s) v[s] = state[s];
    rounds(v, w, data, std::make_index_sequence<16>());
    for (std::size_t s = 0; s < S; ++s) {
      state[s].abef = _mm_add_epi32(state[s].abef, v[s].abef);
      state[s].cdgh = _mm_add_epi32(state[s].cdgh, v[s].cdgh);
      data[s] += block_size;
    }
  }
  for (std::size_t s = 0; s < count; ++s) unpack(state[s], runs[s]->state);
}

}  // namespace

// Three and more were not faster than two: the registers do not hold them.
constinit const Method sha_ni[2] = {{"sha-ni", 1, advance<1>}, {"sha-ni", 2, advance<2>}};
}  // namespace blobstore::hashing
