// Pieces of strict JSON that the scanners of headers and manifests share: each reads one pass over
// a text.
#pragma once

#include <cstdint>
#include <string_view>

namespace blobstore {

// A JSON string without its quotes, and whether a backslash is in it. It points into the text.
struct String {
  std::string_view raw;
  bool escaped;
};

// Every step returns whether the text goes on as it has to; false ends the scan.
//
// The text ends in a NUL that does not count, as Python's bytes do: no JSON goes on over it, so no
// step checks for the end.
class JsonScanner {
 public:
  explicit JsonScanner(std::string_view text) : at_(text.data()) {}

  const char* at() const { return at_; }

  bool take(char wanted) {
    if (*at_ != wanted) return false;
    ++at_;
    return true;
  }

  void skip_space() {
    while (*at_ == ' ' || *at_ == '\n' || *at_ == '\t' || *at_ == '\r') ++at_;
  }

  // An object, or an array: `one` reads each of its values (of an object: with its key).
  template <char open = '{', char close = '}'>
  bool members(auto one) {
    if (!take(open)) return false;
    skip_space();
    if (take(close)) return true;
    do {
      skip_space();
      if (!one()) return false;
      skip_space();
    } while (take(','));
    return take(close);
  }

  // The caller decodes the contents.
  bool string(String& value) {
    if (!take('"')) return false;
    const char* const begin = at_;
    value.escaped = false;
    while (*at_ != '"') {
      if (*at_ == '\\') {
        value.escaped = true;
        ++at_;
      }
      if (static_cast<unsigned char>(*at_) < ' ') return false;
      ++at_;
    }
    value.raw = {begin, at_};
    ++at_;
    return true;
  }

  bool key(String& value) {
    if (!string(value)) return false;
    skip_space();
    if (!take(':')) return false;
    skip_space();
    return true;
  }

  // The caller checks what follows the digits: after "01" or "1.0" it finds neither comma nor
  // bracket.
  bool number(std::uint64_t& value) {
    value = 0;
    if (take('0')) return true;
    if (*at_ < '1' || *at_ > '9') return false;
    for (; *at_ >= '0' && *at_ <= '9'; ++at_) {
      if (__builtin_mul_overflow(value, std::uint64_t{10}, &value)) return false;
      const auto digit = static_cast<std::uint64_t>(*at_ - '0');
      if (__builtin_add_overflow(value, digit, &value)) return false;
    }
    return true;
  }

  bool null() { return take('n') && take('u') && take('l') && take('l'); }

  // A value of any kind up to the comma or bracket after it. Only of JSON its end is right: the
  // caller checks the text.
  bool skip_value() {
    for (unsigned depth = 0;; ++at_) {
      const char one = *at_;
      if (depth == 0 && (one == ',' || one == '}' || one == ']')) return true;
      if (one == '\0') return false;
      if (one == '"') {
        String unused;
        if (!string(unused)) return false;
        --at_;
      } else if (one == '{' || one == '[') {
        ++depth;
      } else if (one == '}' || one == ']') {
        --depth;
      }
    }
  }

 private:
  const char* at_;
};

}  // namespace blobstore
