// ring: batches of reads and writes of one file through io_uring. What uringshim.go calls. A ring has one user at a time.
#ifndef URINGSHIM_RING_H
#define URINGSHIM_RING_H

#include <stddef.h>
#include <stdint.h>

typedef struct uringshim_ring uringshim_ring;

// uringshim_op is one read or write. The address is a number: Go must not hold pointers in memory that it passes to C.
typedef struct {
    uint64_t offset;
    uint64_t address;
    uint32_t length;
    uint32_t tag; // comes back when it has ended
} uringshim_op;

// uringshim_end is how one ended: 0 all of it was moved, 1 the file ended before it, negative: -errno.
typedef struct {
    uint32_t tag;
    int32_t result;
} uringshim_end;

// uringshim_new makes a ring for depth operations at a time on fd. It answers -errno when io_uring cannot be had.
int uringshim_new(unsigned depth, int fd, uringshim_ring **out);

// A holder keeps memory registered, so that the kernel need not look up and hold its pages for each operation: a ring that does no I/O, for others to take it over from.
typedef struct uringshim_holder uringshim_holder;

// uringshim_hold makes a holder that has registered nothing yet. -errno: it is not to be had.
int uringshim_hold(uint64_t address, uint64_t length, uringshim_holder **out);

// uringshim_pin registers the next piece. It answers 1 while there is more, 0 when that was all, -errno when it is refused.
int uringshim_pin(uringshim_holder *h);

// uringshim_let_go gives a holder back. Rings that have taken its memory over keep that until they are closed.
void uringshim_let_go(uringshim_holder *h);

// uringshim_take has a ring, of which nothing is under way, use what a holder has registered. -errno, and it goes on without: -EINVAL before Linux 6.12.
int uringshim_take(uringshim_ring *r, const uringshim_holder *h);

// uringshim_step begins n operations, waits until at least `wait` of those that are under way have ended (0: does not wait), and answers how many of those
// that have it wrote into ends, which has room for depth. No more than depth are under way at a time: n has room beside them. What was moved in part goes on,
// interrupted calls are repeated.
unsigned uringshim_step(uringshim_ring *r, int write, const uringshim_op *ops, unsigned n, unsigned wait, uringshim_end *ends);

// uringshim_broken is -errno when the kernel has refused to take operations for another reason than lack of resources. The ring ends all with it from then on.
int uringshim_broken(const uringshim_ring *r);

// uringshim_free gives a ring back. Nothing is under way.
void uringshim_free(uringshim_ring *r);

#endif
