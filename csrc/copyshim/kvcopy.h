// kvcopy: copies of segments with a CRC32C made on the way. Plain C without state of its own, shared by the daemon (cgo) and
// the Python extension. Every function may be called from any number of threads.
#ifndef KVCOPY_H
#define KVCOPY_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    void *dst;
    const void *src;
    size_t len;
} kvcopy_seg;

// KVCOPY_NT allows stores that bypass the cache. They are used where the batch is large enough to profit.
#define KVCOPY_NT 1u

// kvcopy_copy copies n segments in order; a source and a destination must not overlap. Unless crc is NULL, *crc becomes the CRC32C of
// all source bytes, continued from *crc as it was on entry (0 starts a new one); it equals Go's crc32.Checksum with the
// Castagnoli table. Stores that bypassed the cache are fenced before it returns.
//
// The source may change meanwhile: the CRC is that of the bytes that were stored into dst, each source byte being read once.
void kvcopy_copy(const kvcopy_seg *segs, size_t n, uint32_t *crc, unsigned flags);

// kvcopy_crc32c continues crc over len bytes.
uint32_t kvcopy_crc32c(uint32_t crc, const void *p, size_t len);

// kvcopy_isa names the instructions in use: "avx512-vpclmul", "sse-pclmul" or "portable".
const char *kvcopy_isa(void);

#ifdef __cplusplus
}
#endif

#endif
