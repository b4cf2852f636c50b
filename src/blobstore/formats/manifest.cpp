#include "manifest.h"

#include <algorithm>

namespace blobstore {

namespace {

constexpr std::string_view digest_start = "sha256:";

class ManifestScanner : JsonScanner {
 public:
  ManifestScanner(std::string_view text, LayerScan& found)
      : JsonScanner(text), start_(text.data()), found_(found) {}

  // What follows the object is left to the caller, as are all other values.
  bool manifest() {
    bool is_found = false;
    const auto member = [&, this] {
      String name;
      if (!key(name)) return false;
      if (name.raw != "layers") return skip_value();
      if (is_found) return false;
      is_found = true;
      return layers();
    };
    skip_space();
    return members(member) && is_found;
  }

 private:
  bool layers() {
    found_.begin = place();
    if (!members<'[', ']'>([this] { return layer(found_.layers.emplace_back()); })) return false;
    found_.end = place();
    return true;
  }

  std::size_t place() const { return static_cast<std::size_t>(at() - start_); }

  bool layer(Layer& layer) {
    unsigned seen = 0;
    const auto once = [&](unsigned bit) {
      const bool is_new = (seen & bit) == 0;
      seen |= bit;
      return is_new;
    };
    const auto field = [&, this] {
      String name;
      if (!key(name)) return false;
      if (name.raw == "mediaType") return once(1) && string(layer.media_type);
      if (name.raw == "digest") return once(2) && digest(layer.hex);
      if (name.raw == "size") return once(4) && size(layer.size);
      if (name.raw == "from") return once(8) && text_or_null(layer.source);
      return name.raw == "name" && once(16) && text_or_null(layer.name);
    };
    return members(field) && (seen & 7) == 7;
  }

  bool digest(std::string_view& hex) {
    String text;
    if (!string(text) || !text.raw.starts_with(digest_start)) return false;
    hex = text.raw.substr(digest_start.size());
    return hex.size() == hex_digits && std::ranges::all_of(hex, [](char one) {
             return (one >= '0' && one <= '9') || (one >= 'a' && one <= 'f');
           });
  }

  bool size(std::uint64_t& value) { return number(value) && value <= most_blob_bytes; }

  bool text_or_null(std::optional<String>& value) {
    return at()[0] == 'n' ? null() : string(value.emplace());
  }

  const char* const start_;
  LayerScan& found_;
};

}  // namespace

std::optional<LayerScan> scan_layers(std::string_view text) {
  LayerScan found{};
  if (!ManifestScanner(text, found).manifest()) return {};
  return found;
}

}  // namespace blobstore
