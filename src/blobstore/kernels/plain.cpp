// Plain loops, for every processor: one value at a time, or as many as the compiler makes of it.
#define BLOBSTORE_TARGET plain_loops
#define BLOBSTORE_TABLE plain
#define BLOBSTORE_NAME "plain"
#define BLOBSTORE_LANES 1
#include "target.h"
