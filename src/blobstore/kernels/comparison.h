// Compare weights with what they are read back as: sums of squares and products, the largest error,
// and how many weights lie beyond their group's codes. Compiled for any processor.
//
// All arithmetic is IEEE binary64 of exact values. Pair i is added to lane i % 8 of every sum, in
// order, and the eight lanes are added at the end, so the bits depend neither on the target nor on
// where a group ends. A block at a time is made doubles, which stay in the first cache.
#pragma once

#include <algorithm>

#include "kernels.h"

namespace blobstore {

// Weights, and a run of floats or the codes that they are read back from; `stored.out` is not used.
struct CompareJob {
  const void* weights;
  std::size_t float_type, count;
  const void* read;  // null for codes
  std::size_t read_type, quant_type;
  DequantizeJob stored;
};

inline Comparison total_of(const Sums& sums) {
  const auto sum_of = [](const double(&lane)[sum_lanes]) {
    const double first = (lane[0] + lane[1]) + (lane[2] + lane[3]);
    const double last = (lane[4] + lane[5]) + (lane[6] + lane[7]);
    return first + last;
  };
  return {
      .squared_error = sum_of(sums.squared_error),
      .squared_weight = sum_of(sums.squared_weight),
      .squared_read = sum_of(sums.squared_read),
      .product = sum_of(sums.product),
      .max_error = *std::max_element(sums.max_error, sums.max_error + sum_lanes),
      .beyond = static_cast<std::size_t>(sum_of(sums.beyond)),
  };
}

// `count` stored values of a job from index `start` on, where a group begins.
inline DequantizeJob part_of(const CompareJob& job, std::size_t start, std::size_t count) {
  DequantizeJob part = job.stored;
  const std::size_t item = is_affine(job.quant_type) ? item_size(part.scale_type) : 1;
  const std::size_t scales_before = start / part.group_size * item;
  part.count = count;
  part.codes += start * bits_of(job.quant_type) / 8;
  part.scales = static_cast<const std::byte*>(part.scales) + scales_before;
  if (part.biases) part.biases = static_cast<const std::byte*>(part.biases) + scales_before;
  return part;
}

inline Comparison compare(const Target& target, const CompareJob& job) {
  constexpr std::size_t block = 1024, smallest_group = 16;  // whole groups of every size
  double weights[block], read[block], low[block / smallest_group], high[block / smallest_group];
  float values[block];
  Sums sums{};
  for (std::size_t start = 0; start < job.count; start += block) {
    const std::size_t count = std::min(block, job.count - start);
    const auto at = [start](const void* floats, std::size_t type) {
      return static_cast<const std::byte*>(floats) + start * item_size(type);
    };
    target.to_doubles[job.float_type](at(job.weights, job.float_type), count, weights);
    if (job.read) {
      target.to_doubles[job.read_type](at(job.read, job.read_type), count, read);
      const std::size_t whole = (count + sum_lanes - 1) / sum_lanes * sum_lanes;
      std::fill(weights + count, weights + whole, 0.0);  // such pairs add nothing
      std::fill(read + count, read + whole, 0.0);
      target.add_pairs(weights, read, whole, whole, nullptr, nullptr, sums);
    } else {
      DequantizeJob part = part_of(job, start, count);
      part.out = values;
      target.dequantize[job.quant_type][f32](part);
      target.to_doubles[f32](values, count, read);
      plain.limits[job.quant_type](part, low, high);
      target.add_pairs(weights, read, count, part.group_size, low, high, sums);
    }
  }
  return total_of(sums);
}

}  // namespace blobstore
