// Floats<N> and Words<N>: N floats or 32-bit integers that are computed at once, by the compiler's
// vector types (those of GCC and Clang are the same).
//
// An arithmetic function that is written for `F` (floats) and `U` (their bits) serves one value as
// well as N: operators, comparisons and `mask ? a : b` mean the same for both, each lane by itself.
// N is 1 for plain loops, else the width of the target's registers. Everything lives in the
// target's own namespace, because one source is compiled for several targets and the linker would
// merge functions of one name.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace blobstore::BLOBSTORE_TARGET {

template <typename T, std::size_t N>
struct VectorOf {
  typedef T type __attribute__((vector_size(N * sizeof(T))));
};
template <typename T>
struct VectorOf<T, 1> {
  using type = T;
};
template <typename T, std::size_t N>
using Vector = typename VectorOf<T, N>::type;

template <std::size_t N>
using Floats = Vector<float, N>;
template <std::size_t N>
using Words = Vector<std::uint32_t, N>;

// The unsigned integers with the bits of `F`, and back.
template <typename F>
using BitsOf = Words<sizeof(F) / 4>;

template <typename F>
constexpr BitsOf<F> bits_of(F value) {
  return __builtin_bit_cast(BitsOf<F>, value);
}

template <typename U>
using FloatOf = Floats<sizeof(U) / 4>;

template <typename U>
constexpr FloatOf<U> float_of(U bits) {
  return __builtin_bit_cast(FloatOf<U>, bits);
}

// The value in every lane.
template <typename V, typename T>
constexpr V all_of(T value) {
  return V{} + value;
}

template <typename V>
inline V min_of(V a, V b) {
  return a < b ? a : b;
}
template <typename V>
inline V max_of(V a, V b) {
  return a > b ? a : b;
}
// The same in one instruction, which GCC does not always find: of a NaN and a number both give the
// second.
#if defined(__AVX2__)
inline Floats<8> min_of(Floats<8> a, Floats<8> b) { return _mm256_min_ps(a, b); }
inline Floats<8> max_of(Floats<8> a, Floats<8> b) { return _mm256_max_ps(a, b); }
#endif
#if defined(__AVX512F__)
inline Floats<16> min_of(Floats<16> a, Floats<16> b) { return _mm512_min_ps(a, b); }
inline Floats<16> max_of(Floats<16> a, Floats<16> b) { return _mm512_max_ps(a, b); }
#endif
template <typename F>
inline F abs_of(F value) {
  return float_of(bits_of(value) & 0x7fffffffu);
}

template <typename V, typename T>
inline V load(const T* from) {
  V value;
  std::memcpy(&value, from, sizeof value);
  return value;
}
template <typename V, typename T>
inline void store(T* to, V value) {
  std::memcpy(to, &value, sizeof value);
}

// The floats of a table of 16 at each lane's index.
template <typename U>
inline FloatOf<U> look_up(const float* table, U index) {
  float found[sizeof(U) / 4];
  std::uint32_t at[sizeof(U) / 4];
  store(at, index);
  for (std::size_t i = 0; i < sizeof(U) / 4; ++i) found[i] = table[at[i]];
  return load<FloatOf<U>>(found);
}
#if defined(__AVX512F__)
inline Floats<16> look_up(const float* table, Words<16> index) {
  return _mm512_permutexvar_ps(__builtin_bit_cast(__m512i, index), _mm512_loadu_ps(table));
}
#elif defined(__AVX2__)
inline Floats<8> look_up(const float* table, Words<8> index) {
  const auto at = __builtin_bit_cast(__m256i, index);
  const Floats<8> low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), at);
  const Floats<8> high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), at);
  return index < 8u ? low : high;
}
#endif

// True when the mask of a comparison holds in any lane.
template <typename M>
inline bool any_of(M mask) {
  if constexpr (std::is_same_v<M, bool>) {
    return mask;
  } else {
    bool any = false;
    for (std::size_t i = 0; i < sizeof(M) / sizeof(mask[0]); ++i) any |= mask[i] != 0;
    return any;
  }
}

}  // namespace blobstore::BLOBSTORE_TARGET
