// Split items into planes of bytes, and join them: the exponents of floats then lie side by side.
//
// An item (2 or 4 bytes) is rotated left by one bit, so that its sign follows the mantissa: the
// first byte of BF16 and F32 is then the exponent, that of F16 the exponent and three bits of the
// mantissa. Plane k has byte k of every item, the most significant byte first. With a base, the
// items are combined with the base's by XOR before they are split, and after they are joined.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels.h"

namespace blobstore::BLOBSTORE_TARGET {

template <typename Item>
inline Item item_at(const std::byte* items, std::size_t i) {
  Item item;
  std::memcpy(&item, items + i * sizeof item, sizeof item);
  return item;
}

// The shift that leads byte `k` of an item to its end.
template <typename Item>
constexpr unsigned shift_of(unsigned k) {
  return 8 * (sizeof(Item) - 1 - k);
}

// Plain loops over a few planes, from which compilers make vector code.
template <typename Item, bool has_base>
void split_planes(const PlanesJob& job) {
  constexpr unsigned bits = 8 * sizeof(Item);
  const std::size_t count = job.count;
  const std::byte* const __restrict items = job.items;
  const std::byte* const __restrict base = job.base;
  std::uint8_t* const __restrict planes = job.planes;
  for (std::size_t i = 0; i < count; ++i) {
    Item item = item_at<Item>(items, i);
    if constexpr (has_base) item = static_cast<Item>(item ^ item_at<Item>(base, i));
    item = static_cast<Item>(item << 1 | item >> (bits - 1));
    for (unsigned k = 0; k < sizeof(Item); ++k) {
      planes[k * count + i] = static_cast<std::uint8_t>(item >> shift_of<Item>(k));
    }
  }
}

template <typename Item, bool has_base>
void join_planes(const PlanesJob& job) {
  constexpr unsigned bits = 8 * sizeof(Item);
  const std::size_t count = job.count;
  std::byte* const __restrict items = job.items;
  const std::byte* const __restrict base = job.base;
  const std::uint8_t* const __restrict planes = job.planes;
  for (std::size_t i = 0; i < count; ++i) {
    Item item = 0;
    for (unsigned k = 0; k < sizeof(Item); ++k) {
      item = static_cast<Item>(item | Item{planes[k * count + i]} << shift_of<Item>(k));
    }
    item = static_cast<Item>(item >> 1 | item << (bits - 1));
    if constexpr (has_base) item = static_cast<Item>(item ^ item_at<Item>(base, i));
    std::memcpy(items + i * sizeof item, &item, sizeof item);
  }
}

}  // namespace blobstore::BLOBSTORE_TARGET
