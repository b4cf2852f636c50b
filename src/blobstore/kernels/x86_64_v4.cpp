// AVX-512: the level x86-64-v4 of the x86-64 psABI.
#define BLOBSTORE_TARGET avx512
#define BLOBSTORE_TABLE x86_64_v4
#define BLOBSTORE_NAME "x86-64-v4"
#define BLOBSTORE_LANES 16
#include "target.h"
