// AVX2 and its companions: the level x86-64-v3 of the x86-64 psABI.
#define BLOBSTORE_TARGET avx2
#define BLOBSTORE_TABLE x86_64_v3
#define BLOBSTORE_NAME "x86-64-v3"
#define BLOBSTORE_LANES 8
#include "target.h"
