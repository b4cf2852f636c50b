#include "files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <new>
#include <optional>
#include <thread>
#include <utility>

namespace blobstore {

namespace {

constexpr std::size_t prefix_bytes = 8;  // rule F1: the header's length, little-endian
constexpr std::size_t head_bytes = 4096;  // headers of most blobs end within a page
constexpr std::size_t files_a_thread = 128;  // fewer are read before a thread has started
constexpr std::size_t most_threads = 4;
constexpr std::size_t files_a_turn = 16;
constexpr std::size_t bytes_a_file = 1024;  // of memory, for most headers
constexpr std::size_t most_first_bytes = std::size_t{64} << 10;  // of memory, before any is needed

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

bool read_at(int fd, void* to, std::size_t nbytes, std::size_t offset) {
  return pread(fd, to, nbytes, static_cast<off_t>(offset)) == static_cast<ssize_t>(nbytes);
}

// `long_text`: bytes of headers that do not end in their first page.
const FileHeader* header_of(int folder, const File& file, std::atomic<std::uint64_t>& long_text,
                            std::pmr::memory_resource* memory) {
  const auto& [name, size] = file;
  const Descriptor open_file(
      openat(folder, name.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW));
  struct stat status;
  if (open_file.get() < 0 || fstat(open_file.get(), &status) != 0) return {};
  if (!S_ISREG(status.st_mode) || static_cast<std::uint64_t>(status.st_size) != size) return {};
  unsigned char head[head_bytes];
  const std::size_t wanted = std::min<std::uint64_t>(size, sizeof head);
  if (wanted < prefix_bytes || !read_at(open_file.get(), head, wanted, 0)) return {};
  const std::uint64_t length = length_in(head);
  if (length > std::min<std::uint64_t>(size - prefix_bytes, most_header_bytes)) return {};
  const std::size_t there = std::min<std::size_t>(length, wanted - prefix_bytes);
  const std::size_t rest = length - there;
  if (rest > 0 && long_text.fetch_add(length) + length > most_long_bytes) return {};
  auto* const text = static_cast<char*>(memory->allocate(length + 1, 1));
  std::memcpy(text, head + prefix_bytes, there);
  if (rest > 0 && !read_at(open_file.get(), text + there, rest, wanted)) return {};
  text[length] = '\0';
  const std::string_view view(text, length);
  std::optional<Scan> scanned = scan(view, size - prefix_bytes - length, memory);
  if (!scanned) return {};
  void* const place = memory->allocate(sizeof(FileHeader), alignof(FileHeader));
  return new (place) FileHeader{view, std::move(*scanned)};
}

// Files that several threads read, each the next ones that no thread has taken.
class Reading {
 public:
  Reading(int folder, const std::vector<File>& files, FileHeaders& headers)
      : folder_(folder), files_(files), headers_(headers) {}

  // Without memory, the caller reads a file, and says so.
  void read(std::pmr::memory_resource* memory) noexcept {
    while (true) {
      const std::size_t first = next_.fetch_add(files_a_turn);
      if (first >= files_.size()) return;
      const std::size_t end = std::min(first + files_a_turn, files_.size());
      for (std::size_t place = first; place < end; ++place) {
        try {
          headers_.each[place] = header_of(folder_, files_[place], long_text_, memory);
        } catch (const std::bad_alloc&) {
        }
      }
    }
  }

 private:
  const int folder_;
  const std::vector<File>& files_;
  FileHeaders& headers_;
  std::atomic<std::size_t> next_ = 0;
  std::atomic<std::uint64_t> long_text_ = 0;
};

}  // namespace

FileHeaders headers_in(int folder, const std::vector<File>& files) {
  FileHeaders headers;
  headers.each.resize(files.size());
  const std::size_t threads =
      std::clamp<std::size_t>(files.size() / files_a_thread, 1, most_threads);
  const std::size_t nbytes = bytes_a_file * (files.size() / threads + 1);
  for (std::size_t one = 0; one < threads; ++one) {
    headers.memory.push_back(
        std::make_unique<std::pmr::monotonic_buffer_resource>(std::min(nbytes, most_first_bytes)));
  }
  Reading reading(folder, files, headers);
  std::vector<std::thread> others;
  others.reserve(threads);
  try {
    for (std::size_t one = 1; one < threads; ++one) {
      others.emplace_back([&, one] { reading.read(headers.memory[one].get()); });
    }
  } catch (const std::exception&) {  // no more threads, or memory: those that there are read all
  }
  reading.read(headers.memory[0].get());
  for (std::thread& other : others) other.join();
  return headers;
}

}  // namespace blobstore
