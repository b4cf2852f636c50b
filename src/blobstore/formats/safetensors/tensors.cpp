#include "tensors.h"

#include <algorithm>
#include <numeric>
#include <tuple>

namespace blobstore {

bool Tensors::fits(const Entry& entry) const {
  std::uint64_t bits = dtypes[entry.dtype].bits;
  bool empty = false;
  for (unsigned axis = 0; axis < entry.rank; ++axis) {
    const std::uint64_t dim = dims[entry.first_dim + axis];
    empty = empty || dim == 0;
    if (dim != 0 && __builtin_mul_overflow(bits, dim, &bits)) return false;
  }
  if (empty) bits = 0;
  return entry.begin <= entry.end && bits % 8 == 0 && bits / 8 == entry.end - entry.begin;
}

bool Tensors::cover(std::optional<std::uint64_t> data_size) const {
  const auto range = [this](std::uint32_t index) { return std::tuple(entries[index].begin, entries[index].end); };
  std::vector<std::uint32_t> order(entries.size());
  std::iota(order.begin(), order.end(), 0);
  // Files are mostly written in the order of their data.
  if (!std::ranges::is_sorted(order, {}, range)) std::ranges::sort(order, {}, range);
  std::uint64_t expected = 0;
  for (const std::uint32_t index : order) {
    if (entries[index].begin != expected) return false;
    expected = entries[index].end;
  }
  return !data_size || *data_size == expected;
}

}  // namespace blobstore
