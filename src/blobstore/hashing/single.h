// The rounds of SHA-256 for one stream (FIPS 180-4, section 6.2.2), for any source of the message
// schedule. The file of a target includes this one.
#pragma once

#include <bit>
#include <cstring>
#include <utility>

#include "sha256.h"

namespace blobstore::hashing::BLOBSTORE_TARGET {

using Word = std::uint32_t;

// Round t. The letters move by one name a round instead of from variable to variable: `v` holds a
// to h, and a is v[-t mod 8]. `schedule` gives word t plus its constant. `before` is b ^ c, which is
// the round before's a ^ b.
template <std::size_t t, typename Schedule>
inline void one_round(Word (&v)[8], Word& before, Schedule& schedule) {
  using std::rotr;
  Word &a = v[(64 - t) % 8], &b = v[(65 - t) % 8], &d = v[(67 - t) % 8];
  Word &e = v[(68 - t) % 8], &f = v[(69 - t) % 8], &g = v[(70 - t) % 8], &h = v[(71 - t) % 8];
  h += schedule.template word<t>();
  h += (e & f) + (~e & g);
  h += rotr(e, 6) ^ rotr(e, 11) ^ rotr(e, 25);
  d += h;
  const Word differ = a ^ b;
  h += b ^ (differ & before);
  before = differ;
  h += rotr(a, 2) ^ rotr(a, 13) ^ rotr(a, 22);
}

template <typename Schedule, std::size_t... t>
inline void all_rounds(Word (&v)[8], Schedule& schedule, std::index_sequence<t...>) {
  Word before = v[1] ^ v[2];
  (one_round<t>(v, before, schedule), ...);
}

template <typename Schedule>
inline void hash_block(Word* state, Schedule schedule) {
  Word v[8];
  std::memcpy(v, state, sizeof v);
  all_rounds(v, schedule, std::make_index_sequence<64>());
  for (std::size_t i = 0; i < 8; ++i) state[i] += v[i];
}

}  // namespace blobstore::hashing::BLOBSTORE_TARGET
