// Decode block FP8 weights: E4M3 codes of a row-major matrix, each block of 128 x 128 with a float32 scale.
//
// Every value is by itself, so how a run is cut, into lanes or into calls, does not show in the result.
#pragma once

#include <algorithm>

#include "kernels.h"
#include "units.h"

namespace blobstore::BLOBSTORE_TARGET {

// code * scale, rounded to float32, and that to BF16. NaN, wherever it comes from, is 0x7fc0; what overflows is infinite.
template <std::size_t N>
inline void decode_unit(const std::byte* codes, float scale, std::uint16_t* out) {
  typename Lanes<N>::U even, odd;
  load_codes<E4M3::bits, N>(codes, even, odd);
  store_unit<Bf16, N>(out, {E4M3::decode(even) * scale, E4M3::decode(odd) * scale});
}

// A run of codes with one scale.
template <std::size_t N>
inline void decode_span(const std::byte* codes, float scale, std::size_t count, std::uint16_t* out) {
  constexpr std::size_t size = Unit<N>::size;
  std::size_t i = 0;
  for (; i + size <= count; i += size) decode_unit<N>(codes + i, scale, out + i);
  if (i == count) return;
  std::byte rest[size] = {};  // nothing beyond the run is read or written
  std::uint16_t values[size];
  std::memcpy(rest, codes + i, count - i);
  decode_unit<N>(rest, scale, values);
  std::memcpy(out + i, values, (count - i) * sizeof values[0]);
}

template <std::size_t N>
void decode_blocks(const BlocksJob& job) {
  if (job.count == 0) return;
  const std::size_t scales_per_row = (job.cols - 1) / fp8_block + 1;
  std::size_t row = job.first / job.cols;
  std::size_t column = job.first % job.cols;
  for (std::size_t i = 0; i < job.count;) {
    const float scale = job.scales[row / fp8_block * scales_per_row + column / fp8_block];
    const std::size_t to_next_scale = std::min(fp8_block - column % fp8_block, job.cols - column);
    const std::size_t size = std::min(to_next_scale, job.count - i);
    decode_span<N>(job.codes + i, scale, size, job.out + i);
    i += size;
    column += size;
    if (column == job.cols) {
      column = 0;
      ++row;
    }
  }
}

}  // namespace blobstore::BLOBSTORE_TARGET
