// The scanner of manifests: one pass that finds the layers, or declines, without a reason.
//
// documents.py, its twin in Python, reads the rest of the text, and all of what is declined: it
// gives the verdict and the error's message. So only the layers that are accepted here have to be
// right: strict JSON, no key twice in a layer, and rule M1 (documents.py), except for the contents
// of strings, which the caller decodes, and the length of media types, which it counts in
// characters.
//
// Declined though legal: unknown keys in a layer; escapes in keys and digests; another value than
// an array under `layers`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "json_scanner.h"

namespace blobstore {

constexpr std::uint64_t most_blob_bytes = std::uint64_t{1} << 48;  // MAX_BLOB of documents.py
constexpr std::size_t hex_digits = 64;                             // of a digest

// A layer's values by key.
struct Layer {
  String media_type;
  std::string_view hex;  // of the digest
  std::uint64_t size = 0;
  std::optional<String> source, name;  // `from` and `name`; none for null, too
};

// The layers of a manifest, and where their array begins and ends in the text.
struct LayerScan {
  std::vector<Layer> layers;
  std::size_t begin, end;
};

// `text` ends in a NUL that does not count.
//
// If the text with an empty array at [begin, end) is strict JSON, then the text is, and its values
// are the same but for the layers.
std::optional<LayerScan> scan_layers(std::string_view text);

}  // namespace blobstore
