// Unit<N>: 2 N neighbouring weights of a row, the even ones in one vector and the odd ones in
// another.
//
// Two neighbours of 16 bits are one lane of 32, so splitting a unit and joining it costs a shift
// and a mask, and two codes become one byte (or one pair of bytes) in their own lane. Little-endian
// only, as safetensors is.
#pragma once

#include "formats.h"

namespace blobstore::BLOBSTORE_TARGET {

static_assert(std::endian::native == std::endian::little);

template <std::size_t N>
struct Unit {
  static constexpr std::size_t size = 2 * N;
  Floats<N> even, odd;
};

template <std::size_t N, std::size_t... i>
inline Unit<N> split(Floats<N> a, Floats<N> b, std::index_sequence<i...>) {
  return {__builtin_shufflevector(a, b, 2 * i...), __builtin_shufflevector(a, b, 2 * i + 1 ...)};
}
// The neighbours of even and odd lanes again: N of them, from lane `first` on.
template <std::size_t N, std::size_t first, std::size_t... i>
inline Floats<N> interleave(Floats<N> even, Floats<N> odd, std::index_sequence<i...>) {
  return __builtin_shufflevector(even, odd, (first + i / 2 + i % 2 * N)...);
}

template <typename Float, std::size_t N>
inline Unit<N> load_unit(const typename Float::Bits* from) {
  if constexpr (sizeof(typename Float::Bits) == 2) {
    const auto pairs = load<Words<N>>(from);
    return {Float::decode(pairs), Float::decode(pairs >> 16)};
  } else if constexpr (N == 1) {
    return {Float::decode(from[0]), Float::decode(from[1])};
  } else {
    using F = Floats<N>;
    return split<N>(load<F>(from), load<F>(from + N), std::make_index_sequence<N>());
  }
}

// Of each pair of a unit the larger magnitude, as the float's stored bits without the sign.
template <typename Float, std::size_t N>
inline Words<N> largest_magnitude(const typename Float::Bits* from) {
  using U = Words<N>;
  if constexpr (sizeof(typename Float::Bits) == 2) {
    const U pairs = load<U>(from) & 0x7fff7fffu;
    return max_of(U(pairs & 0xffffu), U(pairs >> 16));
  } else {
    return max_of(U(load<U>(from) & 0x7fffffffu), U(load<U>(from + N) & 0x7fffffffu));
  }
}

template <typename Float, std::size_t N>
inline void store_unit(typename Float::Bits* to, Unit<N> unit) {
  if constexpr (sizeof(typename Float::Bits) == 2) {
    store(to, Float::encode(unit.even) | (Float::encode(unit.odd) << 16));
  } else if constexpr (N == 1) {
    to[0] = Float::encode(unit.even);
    to[1] = Float::encode(unit.odd);
  } else {
    using Order = std::make_index_sequence<N>;
    store(to, interleave<N, 0>(unit.even, unit.odd, Order()));
    store(to + N, interleave<N, N / 2>(unit.even, unit.odd, Order()));
  }
}

// Every lane cut to its low bits.
template <typename Small, std::size_t N>
inline Vector<Small, N> narrow(Words<N> wide) {
  if constexpr (N == 1) {
    return static_cast<Small>(wide);
  } else {
    return __builtin_convertvector(wide, Vector<Small, N>);
  }
}
template <typename S>
inline auto widened(S small) {
  return __builtin_convertvector(small, Words<sizeof(S) / sizeof(small[0])>);
}
// The same in one instruction: GCC 12 takes vectors of bytes apart.
#if defined(__AVX2__)
inline __m128i low_half(std::int64_t half) { return _mm_cvtsi64_si128(half); }
inline Words<4> widened(Vector<std::uint16_t, 4> small) {
  const auto half = low_half(__builtin_bit_cast(std::int64_t, small));
  return __builtin_bit_cast(Words<4>, _mm_cvtepu16_epi32(half));
}
inline Words<8> widened(Vector<std::uint8_t, 8> small) {
  const auto half = low_half(__builtin_bit_cast(std::int64_t, small));
  return __builtin_bit_cast(Words<8>, _mm256_cvtepu8_epi32(half));
}
inline Words<8> widened(Vector<std::uint16_t, 8> small) {
  return __builtin_bit_cast(Words<8>, _mm256_cvtepu16_epi32(__builtin_bit_cast(__m128i, small)));
}
#endif
#if defined(__AVX512F__)
inline Words<16> widened(Vector<std::uint8_t, 16> small) {
  return __builtin_bit_cast(Words<16>, _mm512_cvtepu8_epi32(__builtin_bit_cast(__m128i, small)));
}
inline Words<16> widened(Vector<std::uint16_t, 16> small) {
  return __builtin_bit_cast(Words<16>, _mm512_cvtepu16_epi32(__builtin_bit_cast(__m256i, small)));
}
#endif
template <std::size_t N, typename Small>
inline Words<N> widen(Vector<Small, N> small) {
  if constexpr (N == 1) {
    return small;
  } else {
    return widened(small);
  }
}

// Whole numbers below 2^23 as floats: exact.
template <std::size_t N>
inline Floats<N> whole_numbers(Words<N> values) {
  if constexpr (N == 1) {
    return static_cast<float>(values);
  } else {
    const auto as_signed = __builtin_bit_cast(Vector<std::int32_t, N>, values);
    return __builtin_convertvector(as_signed, Floats<N>);
  }
}

// Codes of a unit as they are packed: of two neighbours the first in the lower bits.
template <unsigned bits>
using PackedPair = std::conditional_t<bits == 4, std::uint8_t, std::uint16_t>;

// Stores the low bits of each code; bits above may be set, in the even ones from twice the width
// on.
template <unsigned bits, std::size_t N>
inline void store_codes(std::byte* to, Words<N> even, Words<N> odd) {
  store(to, narrow<PackedPair<bits>, N>(even | (odd << bits)));
}

template <unsigned bits, std::size_t N>
inline void load_codes(const std::byte* from, Words<N>& even, Words<N>& odd) {
  const auto pairs = widen<N, PackedPair<bits>>(load<Vector<PackedPair<bits>, N>>(from));
  even = pairs & ((1u << bits) - 1);
  odd = pairs >> bits;
}

// Small stored values (scales) of N groups.
template <typename Small, std::size_t N>
inline void store_narrow(Small* to, Words<N> values) {
  if constexpr (sizeof(Small) == sizeof(std::uint32_t)) {
    store(to, values);
  } else {
    store(to, narrow<Small, N>(values));
  }
}

}  // namespace blobstore::BLOBSTORE_TARGET
