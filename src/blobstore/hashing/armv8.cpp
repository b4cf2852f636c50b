// Several streams with the SHA-2 instructions of arm64, interleaved: each instruction waits for the
// one before of its stream, and those of other streams fill the wait.
#include <arm_neon.h>

#include <utility>

#include "sha256.h"

namespace blobstore::hashing {
namespace {

struct State {
  uint32x4_t abcd, efgh;
};

// Rounds 4 i to 4 i + 3 of each stream; w holds its last sixteen words, four a vector.
template <std::size_t i, std::size_t S>
inline void four_rounds(State (&v)[S], uint32x4_t (&w)[S][4], const std::uint8_t* const (&data)[S]) {
  const uint32x4_t constants = vld1q_u32(round_constants + 4 * i);
  for (std::size_t s = 0; s < S; ++s) {
    uint32x4_t& now = w[s][i % 4];
    if constexpr (i < 4) {
      now = vreinterpretq_u32_u8(vrev32q_u8(vld1q_u8(data[s] + 16 * i)));
    } else {
      const uint32x4_t begun = vsha256su0q_u32(now, w[s][(i + 1) % 4]);
      now = vsha256su1q_u32(begun, w[s][(i + 2) % 4], w[s][(i + 3) % 4]);
    }
    const uint32x4_t sum = vaddq_u32(now, constants), abcd = v[s].abcd;
    v[s].abcd = vsha256hq_u32(abcd, v[s].efgh, sum);
    v[s].efgh = vsha256h2q_u32(v[s].efgh, abcd, sum);
  }
}

template <std::size_t S, std::size_t... i>
inline void rounds(State (&v)[S], uint32x4_t (&w)[S][4], const std::uint8_t* const (&data)[S],
                   std::index_sequence<i...>) {
  (four_rounds<i>(v, w, data), ...);
}

template <std::size_t S>
void advance(const Run* const* runs, std::size_t count, std::size_t blocks) {
  const std::uint8_t* data[S];
  State state[S], v[S];
  uint32x4_t w[S][4];
  for (std::size_t s = 0; s < S; ++s) {
    const Run& run = *runs[s < count ? s : 0];  // an idle place repeats the first stream
    data[s] = run.data;
    state[s] = {vld1q_u32(run.state), vld1q_u32(run.state + 4)};
  }
  for (; blocks > 0; --blocks) {
    for (std::size_t s = 0; s < S; ++s) v[s] = state[s];
    rounds(v, w, data, std::make_index_sequence<16>());
    for (std::size_t s = 0; s < S; ++s) {
      state[s].abcd = vaddq_u32(state[s].abcd, v[s].abcd);
      state[s].efgh = vaddq_u32(state[s].efgh, v[s].efgh);
      data[s] += block_size;
    }
  }
  for (std::size_t s = 0; s < count; ++s) {
    vst1q_u32(runs[s]->state, state[s].abcd);
    vst1q_u32(runs[s]->state + 4, state[s].efgh);
  }
}

}  // namespace

constinit const Method armv8[3] = {
    {"armv8", 1, advance<1>}, {"armv8", 2, advance<2>}, {"armv8", 4, advance<4>}};
}  // namespace blobstore::hashing
