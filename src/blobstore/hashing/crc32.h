// CRC-32, the checksum of zlib (RFC 1952 section 8). Bits are reversed: the lowest is x^31.
//
// By tables, sixteen bytes a step; where the processor multiplies without carries, all but the last
// bytes are folded first (crc32_fold.cpp).
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace blobstore::hashing {

inline constexpr std::uint32_t crc_polynomial = 0xEDB88320;  // bits reversed
inline constexpr std::size_t crc_step = 16;

using CrcTables = std::array<std::array<std::uint32_t, 256>, crc_step>;

// Table k: the CRC of a byte that k zero bytes follow.
constexpr CrcTables crc_tables_of(std::uint32_t polynomial) {
  CrcTables tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? polynomial : 0);
    tables[0][byte] = crc;
  }
  for (std::size_t k = 1; k < crc_step; ++k) {
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const std::uint32_t before = tables[k - 1][byte];
      tables[k][byte] = (before >> 8) ^ tables[0][before & 0xFF];
    }
  }
  return tables;
}

inline constexpr CrcTables crc_tables = crc_tables_of(crc_polynomial);

inline std::uint32_t load_little_endian(const std::uint8_t* from) {
  std::uint32_t word;
  std::memcpy(&word, from, sizeof word);
  if constexpr (std::endian::native == std::endian::big) word = __builtin_bswap32(word);
  return word;
}

// The CRC of bytes that follow others whose CRC is `crc`.
inline std::uint32_t crc32_by_tables(std::uint32_t crc, const std::uint8_t* data, std::size_t size) {
  crc = ~crc;
  for (; size >= crc_step; data += crc_step, size -= crc_step) {
    std::uint32_t next = 0;
    for (std::size_t word = 0; word < crc_step / 4; ++word) {
      const std::uint32_t bytes = load_little_endian(data + 4 * word) ^ (word == 0 ? crc : 0);
      for (std::size_t i = 0; i < 4; ++i) {
        next ^= crc_tables[crc_step - 1 - 4 * word - i][bytes >> 8 * i & 0xFF];
      }
    }
    crc = next;
  }
  for (; size > 0; ++data, --size) crc = (crc >> 8) ^ crc_tables[0][(crc ^ *data) & 0xFF];
  return ~crc;
}

#if defined(__x86_64__)

// The same of at least 64 bytes (crc32_fold.cpp), where the processor has PCLMULQDQ and SSE4.1.
std::uint32_t crc32_by_folding(std::uint32_t crc, const std::uint8_t* data, std::size_t size);

inline std::uint32_t crc32(std::uint32_t crc, const std::uint8_t* data, std::size_t size) {
  static const bool folds = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
  return folds && size >= 64 ? crc32_by_folding(crc, data, size) : crc32_by_tables(crc, data, size);
}

#else

inline std::uint32_t crc32(std::uint32_t crc, const std::uint8_t* data, std::size_t size) {
  return crc32_by_tables(crc, data, size);
}

#endif

}  // namespace blobstore::hashing
