// Packed codes of other programs, made ours: words that lie with a matrix's inputs first, as GPTQ and
// AWQ store them, become rows of outputs; codes of any width get 4 or 8 bits. Integers only: the same
// for every target.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace blobstore {

inline constexpr std::size_t tile_words = 16;  // of a row, written at once: a line of the cache

// A column of a tile: `count` words, `width` apart, become `here` words of each of `square` rows.
// The places of a word and its codes are exchanged in squares of both.
template <std::size_t square>
inline void turn_column(const std::uint32_t* column, std::size_t count, std::size_t width,
                        std::uint32_t* rows, std::size_t row, std::size_t here) {
  constexpr std::size_t awq_places[] = {0, 4, 1, 5, 2, 6, 3, 7};
  std::uint32_t tile[square][tile_words];
  if (count < square * tile_words) std::memset(tile, 0, sizeof tile);
  for (std::size_t i = 0; i < count; ++i) tile[i % square][i / square] = column[i * width];
  // Halves of words are exchanged first, then bytes, then single codes.
  for (std::size_t step = square / 2; step > 0; step /= 2) {
    const std::uint32_t mask = ~std::uint32_t{0} / ((std::uint32_t{1} << 4 * step) + 1);
    for (std::size_t one = 0; one < square; ++one) {
      if (one & step) continue;
      for (std::size_t i = 0; i < tile_words; ++i) {
        const std::uint32_t low = tile[one][i], high = tile[one + step][i];
        const std::uint32_t changed = ((low >> 4 * step) ^ high) & mask;
        tile[one][i] = low ^ changed << 4 * step;
        tile[one + step][i] = high ^ changed;
      }
    }
  }
  for (std::size_t one = 0; one < square; ++one) {
    const std::size_t place = square == 1 ? 0 : awq_places[one];
    std::memcpy(rows + one * row, tile[place], here * sizeof(std::uint32_t));
  }
}

// `lines`: [count, width]. `square` is 1 if the codes of a word are of one output, or 8 if they are
// of 8 outputs, in AWQ's order. `rows`: [width * square, count / square, rounded up]; missing lines
// are 0 there.
template <std::size_t square>
void turn_words(const std::uint32_t* lines, std::size_t count, std::size_t width,
                std::uint32_t* rows) {
  static_assert(square == 1 || square == 8);
  constexpr std::size_t whole = square * tile_words;
  const std::size_t row = (count + square - 1) / square;
  for (std::size_t first = 0; first < count; first += whole) {
    const std::uint32_t* from = lines + first * width;
    std::uint32_t* to = rows + first / square;
    for (std::size_t i = 0; i < width; ++i, ++from, to += square * row) {
      if (count - first >= whole) {  // with constants, for the compiler
        turn_column<square>(from, whole, width, to, row, tile_words);
      } else {
        turn_column<square>(from, count - first, width, to, row, row - first / square);
      }
    }
  }
}

// Codes of `bits`, from the lowest of each word up, become codes of `wide` bits, 4 or 8. `used` bits of
// a word have codes: all, or whole codes. Beyond `count` words, codes are 0.
template <unsigned wide>
void widen_row(const std::uint32_t* words, std::size_t count, unsigned bits, unsigned used,
               std::uint32_t* row, std::size_t size) {
  constexpr std::uint64_t one = 1;
  const unsigned needed = 32 / wide * bits;  // of the codes of a word
  const std::uint64_t useful = (one << used) - 1;
  const std::uint32_t half = (one << needed / 2) - 1, quarter = (one << needed / 4) - 1;
  const std::uint32_t quarters = quarter << 16 | quarter, codes = ((one << bits) - 1) * 0x01010101;
  const std::uint32_t* const end = words + count;
  std::uint64_t waiting = 0;
  unsigned many = 0;  // bits that wait
  for (std::size_t i = 0; i < size; ++i, waiting >>= needed, many -= needed) {
    if (many < needed) {
      waiting |= (words < end ? *words++ & useful : 0) << many;
      many += used;
    }
    std::uint32_t word = (waiting & half) | (waiting >> needed / 2 & half) << 16;
    word = (word & quarters) | (word >> needed / 4 & quarters) << 8;
    row[i] = wide == 8 ? word : (word & codes) | (word >> bits & codes) << 4;
  }
}

}  // namespace blobstore
