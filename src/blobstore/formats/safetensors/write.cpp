#include "write.h"

#include <charconv>
#include <cstddef>

namespace blobstore {
namespace {

void write_number(std::string& out, std::uint64_t number) {
  char digits[20];
  out.append(digits, std::to_chars(digits, digits + sizeof digits, number).ptr);
}

void write_escape(std::string& out, unsigned char byte) {
  constexpr char hex[] = "0123456789abcdef";
  switch (byte) {
    case '"': out += "\\\""; break;
    case '\\': out += "\\\\"; break;
    case '\b': out += "\\b"; break;
    case '\f': out += "\\f"; break;
    case '\n': out += "\\n"; break;
    case '\r': out += "\\r"; break;
    case '\t': out += "\\t"; break;
    default: (((out += "\\u00") += hex[byte >> 4]) += hex[byte & 15]);
  }
}

bool plain(unsigned char byte) {
  return byte >= ' ' && byte != '"' && byte != '\\' && byte != '<' && byte != '>' && byte != '&';
}

// U+2028 or U+2029, which end a line in JavaScript.
bool separates_lines(std::string_view utf8) { return utf8.starts_with("\xe2\x80\xa8") || utf8.starts_with("\xe2\x80\xa9"); }

}  // namespace

void write_string(std::string& out, std::string_view utf8) {
  out += '"';
  for (std::size_t at = 0; at < utf8.size(); ++at) {
    const auto byte = static_cast<unsigned char>(utf8[at]);
    if (!plain(byte)) {
      write_escape(out, byte);
    } else if (byte == 0xe2 && separates_lines(utf8.substr(at))) {
      out += utf8[at + 2] == '\xa8' ? "\\u2028" : "\\u2029";
      at += 2;
    } else {
      out += utf8[at];
    }
  }
  out += '"';
}

void write_entry(std::string& out, const Tensors& tensors, const Entry& entry) {
  ((out += "{\"dtype\":\"") += dtypes[entry.dtype].name) += "\",\"shape\":[";
  for (unsigned axis = 0; axis < entry.rank; ++axis) {
    if (axis > 0) out += ',';
    write_number(out, tensors.dims[entry.first_dim + axis]);
  }
  out += "],\"data_offsets\":[";
  write_number(out, entry.begin);
  out += ',';
  write_number(out, entry.end);
  out += "]}";
}

}  // namespace blobstore
