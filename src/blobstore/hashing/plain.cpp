// One stream, on any processor.
#define BLOBSTORE_TARGET plain_single
#include "single.h"

namespace blobstore::hashing {
namespace plain_single {

// Computes the words of a block as they are needed.
struct Schedule {
  const std::uint8_t* data;
  Word w[16];

  template <std::size_t t>
  Word word() {
    using std::rotr;
    if constexpr (t < 16) {
      const std::uint8_t* at = data + 4 * t;
      w[t] = Word{at[0]} << 24 | Word{at[1]} << 16 | Word{at[2]} << 8 | Word{at[3]};
    } else {
      const Word early = w[(t + 1) % 16], late = w[(t + 14) % 16];
      w[t % 16] += (rotr(early, 7) ^ rotr(early, 18) ^ early >> 3) + w[(t + 9) % 16] +
                   (rotr(late, 17) ^ rotr(late, 19) ^ late >> 10);
    }
    return w[t % 16] + round_constants[t];
  }
};

void advance(const Run* const* runs, std::size_t, std::size_t blocks) {
  for (std::size_t i = 0; i < blocks; ++i) {
    hash_block(runs[0]->state, Schedule{runs[0]->data + block_size * i, {}});
  }
}

}  // namespace plain_single

constinit const Method plain[1] = {{"plain", 1, plain_single::advance}};
}  // namespace blobstore::hashing
