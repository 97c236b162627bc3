#include "ring.h"

#include <errno.h>
#include <liburing.h>
#include <sched.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/uio.h>

// Memory is registered in pieces, by one call each: the kernel walks a piece with interrupts off, and whoever changes the process's address space on another core waits for it (ARCHITECTURE.md has figures).
// The kernel's table of a piece has 16 bytes for each page, and a head, in memory of a power of two: just below 16 MiB it takes half of what it takes just above. What crosses a border, one in
// fifteen I/Os of 1 MiB, goes unregistered. A piece is longer only where there would be more than the kernel takes; its longest is 1 GiB.
#define PIECE_BYTES (15ull << 20)
#define PIECE_BYTES_MAX (PIECE_BYTES << 6)
#define PIECES_MAX (1u << 14)
// IORING_REGISTER_CLONE_BUFFERS and its argument, of Linux 6.12. By other names: headers that know it have an enum and a struct of those.
#define REGISTER_CLONE_BUFFERS 30
struct clone_buffers {
    uint32_t from, flags;
    uint32_t rest[6]; // zeros: all buffers, to the same places
};
// How often a submission that the kernel refuses for another reason than lack of resources is tried.
#define REFUSALS_MAX 3

// A flight is an operation under way: what is left of it.
typedef struct {
    uint64_t offset, address;
    uint32_t length, tag;
    bool write;
} flight;

struct uringshim_ring {
    struct io_uring ring;
    unsigned depth;
    flight *flights;
    unsigned *idle, idles;     // flights that are not under way, a stack
    unsigned *queued, queues;  // flights whose entry the kernel has not taken yet, oldest first
    uint64_t base, registered, piece; // memory that is registered, and the length of its pieces
    bool fixed_file;
    int broken; // -errno: the kernel takes nothing from this ring any more
    int fd;
};

int uringshim_new(unsigned depth, int fd, uringshim_ring **out) {
    uringshim_ring *r = calloc(1, sizeof *r);
    if (r == NULL) return -ENOMEM;
    r->flights = calloc(depth, sizeof *r->flights);
    r->idle = calloc(depth, sizeof *r->idle);
    r->queued = calloc(depth, sizeof *r->queued);
    if (r->flights == NULL || r->idle == NULL || r->queued == NULL) {
        free(r->flights), free(r->idle), free(r->queued), free(r);
        return -ENOMEM;
    }
    int err = io_uring_queue_init(depth, &r->ring, IORING_SETUP_COOP_TASKRUN);
    if (err == -EINVAL) err = io_uring_queue_init(depth, &r->ring, 0); // kernels before 5.19
    if (err < 0) {
        free(r->flights), free(r->idle), free(r->queued), free(r);
        return err;
    }
    r->depth = depth;
    r->fd = fd;
    r->fixed_file = io_uring_register_files(&r->ring, &fd, 1) == 0;
    for (unsigned i = 0; i < depth; i++) r->idle[r->idles++] = depth - 1 - i;
    *out = r;
    return 0;
}

struct uringshim_holder {
    struct io_uring ring;
    uint64_t base, length, piece;
    unsigned pieces, pinned;
};

int uringshim_hold(uint64_t address, uint64_t length, uringshim_holder **out) {
    uint64_t piece = PIECE_BYTES;
    while (piece < PIECE_BYTES_MAX && length > piece * PIECES_MAX) piece *= 2;
    if (length == 0 || length > piece * PIECES_MAX) return -EINVAL;
    uringshim_holder *h = calloc(1, sizeof *h);
    if (h == NULL) return -ENOMEM;
    int err = io_uring_queue_init(1, &h->ring, 0);
    if (err < 0) {
        free(h);
        return err;
    }
    h->base = address;
    h->length = length;
    h->piece = piece;
    h->pieces = (unsigned)((length + piece - 1) / piece);
    err = io_uring_register_buffers_sparse(&h->ring, h->pieces);
    if (err < 0) {
        uringshim_let_go(h);
        return err;
    }
    *out = h;
    return 0;
}

int uringshim_pin(uringshim_holder *h) {
    if (h->pinned < h->pieces) {
        uint64_t at = h->pinned * h->piece, left = h->length - at;
        struct iovec v = {(void *)(uintptr_t)(h->base + at), left < h->piece ? left : h->piece};
        int n = io_uring_register_buffers_update_tag(&h->ring, h->pinned, &v, NULL, 1);
        if (n < 0) return n;
        h->pinned++;
    }
    return h->pinned < h->pieces;
}

void uringshim_let_go(uringshim_holder *h) {
    io_uring_queue_exit(&h->ring);
    free(h);
}

int uringshim_take(uringshim_ring *r, const uringshim_holder *h) {
    struct clone_buffers c = {.from = (uint32_t)h->ring.ring_fd};
    int err = io_uring_register((unsigned)r->ring.ring_fd, REGISTER_CLONE_BUFFERS, &c, 1);
    if (err < 0) return err;
    r->base = h->base;
    r->registered = h->length;
    r->piece = h->piece;
    return 0;
}

// queue puts what is left of a flight into the submission queue, which has room for all flights.
static void queue(uringshim_ring *r, unsigned i) {
    flight *f = &r->flights[i];
    struct io_uring_sqe *sqe = io_uring_get_sqe(&r->ring);
    void *p = (void *)(uintptr_t)f->address;
    uint64_t from = f->address - r->base;
    bool fixed = f->address >= r->base && from < r->registered && f->length <= r->registered - from &&
                 from / r->piece == (from + f->length - 1) / r->piece;
    int fd = r->fixed_file ? 0 : r->fd;
    if (fixed && f->write)
        io_uring_prep_write_fixed(sqe, fd, p, f->length, f->offset, (int)(from / r->piece));
    else if (fixed)
        io_uring_prep_read_fixed(sqe, fd, p, f->length, f->offset, (int)(from / r->piece));
    else if (f->write)
        io_uring_prep_write(sqe, fd, p, f->length, f->offset);
    else
        io_uring_prep_read(sqe, fd, p, f->length, f->offset);
    if (r->fixed_file) io_uring_sqe_set_flags(sqe, IOSQE_FIXED_FILE);
    io_uring_sqe_set_data64(sqe, i);
    r->queued[r->queues++] = i;
}

// end says how a flight ended.
static void end(uringshim_ring *r, unsigned i, int32_t result, uringshim_end *ends, unsigned *n) {
    ends[*n].tag = r->flights[i].tag;
    ends[(*n)++].result = result;
    r->idle[r->idles++] = i;
}

// reap takes completions; what is not complete is queued again.
static void reap(uringshim_ring *r, uringshim_end *ends, unsigned *n) {
    struct io_uring_cqe *cqe;
    while (io_uring_peek_cqe(&r->ring, &cqe) == 0) {
        unsigned i = (unsigned)io_uring_cqe_get_data64(cqe);
        int res = cqe->res;
        io_uring_cqe_seen(&r->ring, cqe);
        flight *f = &r->flights[i];
        if (res == -EINTR || res == -EAGAIN) {
            queue(r, i);
        } else if (res < 0) {
            end(r, i, res, ends, n);
        } else if (res == 0) {
            end(r, i, 1, ends, n);
        } else if ((uint32_t)res >= f->length) {
            end(r, i, 0, ends, n);
        } else {
            f->offset += (uint32_t)res;
            f->address += (uint32_t)res;
            f->length -= (uint32_t)res;
            queue(r, i);
        }
    }
}

// give_up ends what the kernel has not taken. It is quiet: liburing tells the kernel of it only when it submits, which this ring does no more.
static void give_up(uringshim_ring *r, int err, uringshim_end *ends, unsigned *n) {
    r->broken = err;
    for (unsigned k = 0; k < r->queues; k++) end(r, r->queued[k], err, ends, n);
    r->queues = 0;
}

unsigned uringshim_step(uringshim_ring *r, int write, const uringshim_op *ops, unsigned n, unsigned wait, uringshim_end *ends) {
    unsigned ended = 0, refusals = 0;
    for (unsigned k = 0; k < n && r->idles > 0; k++) {
        unsigned i = r->idle[--r->idles];
        r->flights[i] = (flight){ops[k].offset, ops[k].address, ops[k].length, ops[k].tag, write != 0};
        queue(r, i);
    }
    for (;;) {
        if (r->broken) give_up(r, r->broken, ends, &ended);
        unsigned under_way = r->depth - r->idles;
        unsigned need = wait > ended ? wait - ended : 0;
        if (need > under_way) need = under_way;
        int err = 0;
        if (r->broken) {
            struct io_uring_cqe *cqe;
            if (need > 0) err = io_uring_wait_cqe(&r->ring, &cqe); // submits nothing
        } else if (r->queues > 0 || (need > 0 && io_uring_cq_ready(&r->ring) < need)) {
            err = io_uring_submit_and_wait(&r->ring, need);
            unsigned left = io_uring_sq_ready(&r->ring), taken = r->queues - left;
            for (unsigned k = 0; k < left; k++) r->queued[k] = r->queued[k + taken];
            r->queues = left;
        }
        reap(r, ends, &ended);
        if (r->queues == 0 && (ended >= wait || r->idles == r->depth)) return ended;
        if (err == -EAGAIN || err == -EBUSY)
            sched_yield(); // no resources: they come with completions
        else if (err < 0 && err != -EINTR && !r->broken && ++refusals >= REFUSALS_MAX)
            r->broken = err;
    }
}

int uringshim_broken(const uringshim_ring *r) { return r->broken; }

void uringshim_free(uringshim_ring *r) {
    io_uring_queue_exit(&r->ring);
    free(r->flights);
    free(r->idle);
    free(r->queued);
    free(r);
}
