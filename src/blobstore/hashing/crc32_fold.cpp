// CRC-32 by multiplying without carries: 64 bytes a step (Gopal et al., "Fast CRC Computation for
// Generic Polynomials Using PCLMULQDQ Instruction", Intel 2009).
//
// A polynomial of 128 bits that others follow is replaced by one of the same remainder that lies
// further back. Four of them are folded over their next four; at last one is left, and the tables
// take its sixteen bytes like any others.
#include <smmintrin.h>
#include <wmmintrin.h>

#include "crc32.h"

namespace blobstore::hashing {

namespace {

// The remainder of x^exponent, with its bits reversed.
constexpr std::uint64_t power(int exponent) {
  std::uint32_t value = 0x80000000;  // x^0
  for (int i = 0; i < exponent; ++i) value = (value >> 1) ^ (value & 1 ? crc_polynomial : 0);
  return std::uint64_t{value} << 1;  // a product of reversed values is one bit short
}

__m128i load(const std::uint8_t* from) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
}

// What has the remainder of `value` when `bits` more bits follow it, and lies over the last of them.
template <int bits>
__m128i folded(__m128i value) {
  const __m128i by = _mm_set_epi64x(power(bits - 32), power(bits + 32));
  return _mm_xor_si128(_mm_clmulepi64_si128(value, by, 0x00),
                       _mm_clmulepi64_si128(value, by, 0x11));
}

}  // namespace

std::uint32_t crc32_by_folding(std::uint32_t crc, const std::uint8_t* data, std::size_t size) {
  __m128i lanes[4];
  for (int i = 0; i < 4; ++i) lanes[i] = load(data + 16 * i);
  lanes[0] = _mm_xor_si128(lanes[0], _mm_cvtsi32_si128(static_cast<int>(~crc)));
  data += 64, size -= 64;
  for (; size >= 64; data += 64, size -= 64) {
    for (int i = 0; i < 4; ++i) {
      lanes[i] = _mm_xor_si128(folded<512>(lanes[i]), load(data + 16 * i));
    }
  }
  __m128i all = lanes[0];
  for (int i = 1; i < 4; ++i) all = _mm_xor_si128(folded<128>(all), lanes[i]);
  std::uint8_t last[16];
  _mm_storeu_si128(reinterpret_cast<__m128i*>(last), all);
  // What is folded has the start of the CRC in it.
  return crc32_by_tables(crc32_by_tables(~std::uint32_t{0}, last, sizeof last), data, size);
}

}  // namespace blobstore::hashing
