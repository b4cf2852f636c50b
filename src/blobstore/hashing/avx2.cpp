// Eight streams in AVX2's lanes.
#define BLOBSTORE_TARGET avx2_lanes
#include "sha256.h"

namespace blobstore::hashing::BLOBSTORE_TARGET {

typedef std::uint32_t Vector __attribute__((vector_size(32)));

template <int bits>
inline Vector rotated(Vector x) {
  return x >> bits | x << (32 - bits);
}
inline Vector parity(Vector a, Vector b, Vector c) { return a ^ b ^ c; }
inline Vector choose(Vector a, Vector b, Vector c) { return c ^ (a & (b ^ c)); }
inline Vector majority(Vector a, Vector b, Vector c) { return (a & b) | (c & (a | b)); }

}  // namespace blobstore::hashing::BLOBSTORE_TARGET

#include "lanes.h"

namespace blobstore::hashing {
constinit const Method avx2[2] = {{"avx2", 1, avx2_lanes::advance_single<8>},
                                  {"avx2", 8, avx2_lanes::advance<8>}};
}
