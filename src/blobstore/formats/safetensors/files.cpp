#include "files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <optional>
#include <utility>

namespace blobstore {

namespace {

constexpr std::size_t prefix_bytes = 8;  // rule F1: the header's length, little-endian

// An open file, closed with its block.
class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (fd_ >= 0) close(fd_);
  }
  int get() const { return fd_; }

 private:
  int fd_;
};

std::uint64_t length_in(const unsigned char* head) {
  std::uint64_t length = 0;
  for (std::size_t place = prefix_bytes; place-- > 0;) length = length << 8 | head[place];
  return length;
}

std::unique_ptr<FileHeader> header_of(int folder, const File& file) {
  const auto& [name, size] = file;
  const Descriptor open_file(
      openat(folder, name.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW));
  struct stat status;
  if (open_file.get() < 0 || fstat(open_file.get(), &status) != 0) return {};
  if (!S_ISREG(status.st_mode) || static_cast<std::uint64_t>(status.st_size) != size) return {};
  unsigned char head[most_head_bytes];
  const std::size_t wanted = std::min<std::uint64_t>(size, sizeof head);
  if (wanted < prefix_bytes) return {};
  if (pread(open_file.get(), head, wanted, 0) != static_cast<ssize_t>(wanted)) return {};
  const std::uint64_t length = length_in(head);
  if (length > wanted - prefix_bytes) return {};
  auto found = std::make_unique<FileHeader>();
  found->text.assign(reinterpret_cast<const char*>(head) + prefix_bytes, length);
  std::optional<Scan> scanned = scan(found->text, size - prefix_bytes - length);
  if (!scanned) return {};
  found->scan = std::move(*scanned);
  return found;
}

}  // namespace

std::vector<std::unique_ptr<FileHeader>> headers_in(int folder, const std::vector<File>& files) {
  std::vector<std::unique_ptr<FileHeader>> headers(files.size());
  std::ranges::transform(files, headers.begin(),
                         [=](const File& file) { return header_of(folder, file); });
  return headers;
}

}  // namespace blobstore
