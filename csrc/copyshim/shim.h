// What copyshim.go calls: a whole batch in one crossing.
#ifndef COPYSHIM_SHIM_H
#define COPYSHIM_SHIM_H

#include <stddef.h>
#include <stdint.h>

// A unit is `segments` segments that follow each other and share one CRC32C, which is continued from its value on entry.
typedef struct {
    uint32_t segments;
    uint32_t crc;
} copyshim_unit;

// copyshim_copy copies the units in order. segs holds kvcopy_seg as three words each: Go must not hold pointers in memory that it passes to C.
void copyshim_copy(const uintptr_t *segs, copyshim_unit *units, size_t n, unsigned flags);

// copyshim_plain copies n segments without a CRC.
void copyshim_plain(const uintptr_t *segs, size_t n, unsigned flags);

#endif
