// Sixteen streams in AVX-512's lanes.
#define BLOBSTORE_TARGET avx512_lanes
#include <immintrin.h>

#include "sha256.h"

namespace blobstore::hashing::BLOBSTORE_TARGET {

typedef std::uint32_t Vector __attribute__((vector_size(64)));

inline __m512i raw(Vector x) { return __builtin_bit_cast(__m512i, x); }
inline Vector cooked(__m512i x) { return __builtin_bit_cast(Vector, x); }

template <int bits>
inline Vector rotated(Vector x) {
  return x >> bits | x << (32 - bits);
}
// The third operand is the truth table of the function.
inline Vector parity(Vector a, Vector b, Vector c) {
  return cooked(_mm512_ternarylogic_epi32(raw(a), raw(b), raw(c), 0x96));
}
inline Vector choose(Vector a, Vector b, Vector c) {
  return cooked(_mm512_ternarylogic_epi32(raw(a), raw(b), raw(c), 0xca));
}
inline Vector majority(Vector a, Vector b, Vector c) {
  return cooked(_mm512_ternarylogic_epi32(raw(a), raw(b), raw(c), 0xe8));
}

}  // namespace blobstore::hashing::BLOBSTORE_TARGET

#include "lanes.h"

namespace blobstore::hashing {
constinit const Method avx512[1] = {{"avx512", 16, avx512_lanes::advance<16>}};
}
