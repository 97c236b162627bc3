#include "shim.h"

#include "kvcopy.h"

_Static_assert(sizeof(kvcopy_seg) == 3 * sizeof(uintptr_t), "a kvcopy_seg is three words");

void copyshim_copy(const uintptr_t *segs, copyshim_unit *units, size_t n, unsigned flags) {
    const kvcopy_seg *s = (const kvcopy_seg *)segs;
    for (size_t i = 0; i < n; i++) {
        kvcopy_copy(s, units[i].segments, &units[i].crc, flags);
        s += units[i].segments;
    }
    __atomic_thread_fence(__ATOMIC_ACQ_REL); // so that a generation which is read after the copy is not read before it
}

void copyshim_plain(const uintptr_t *segs, size_t n, unsigned flags) { kvcopy_copy((const kvcopy_seg *)segs, n, NULL, flags); }
