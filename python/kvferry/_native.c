// What pure Python cannot do for the connector: batched copies with a CRC32C, without the GIL, and atomic access to shared words.
// Every range is checked against its buffer before the first byte moves; after that nothing here can fail.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <pthread.h>
#include <stdbool.h>
#include <sys/mman.h>

#include "kvcopy.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22 // Linux 5.14
#endif

// As in the Region message: block b has its bytes at base + b*stride.
typedef struct {
    uint64_t base;
    uint64_t stride;
    uint64_t bytes;
} plane;

typedef struct {
    const plane *at;
    size_t n;
    uint64_t bytes; // of one block
} planes;

// Fewer bytes than this are not worth a second thread.
#define SECOND_THREAD_BYTES (16u << 20)
#define PLANES_MAX 4096

static bool planes_of(planes *out, const Py_buffer *packed, const char *name) {
    if (packed->len == 0 || packed->len % sizeof(plane) || packed->len / sizeof(plane) > PLANES_MAX) {
        PyErr_Format(PyExc_ValueError, "%s: want 1..%d planes of %zu bytes", name, PLANES_MAX, sizeof(plane));
        return false;
    }
    out->at = packed->buf;
    out->n = (size_t)packed->len / sizeof(plane);
    out->bytes = 0;
    for (size_t i = 0; i < out->n; i++) {
        if (out->at[i].bytes == 0 || out->at[i].bytes > 1u << 30) {
            PyErr_Format(PyExc_ValueError, "%s: a plane has %llu bytes a block", name, (unsigned long long)out->at[i].bytes);
            return false;
        }
        out->bytes += out->at[i].bytes;
    }
    return true;
}

static bool inside(uint64_t offset, uint64_t length, const Py_buffer *memory) {
    return offset <= (uint64_t)memory->len && length <= (uint64_t)memory->len - offset;
}

static bool blocks_inside(const planes *p, const uint32_t *ids, size_t n, const Py_buffer *memory, const char *name) {
    uint32_t last = 0;
    for (size_t i = 0; i < n; i++)
        if (ids[i] > last)
            last = ids[i];
    for (size_t i = 0; i < p->n; i++) {
        uint64_t offset;
        if (__builtin_mul_overflow(p->at[i].stride, (uint64_t)last, &offset) || __builtin_add_overflow(offset, p->at[i].base, &offset) ||
            !inside(offset, p->at[i].bytes, memory)) {
            PyErr_Format(PyExc_ValueError, "%s: block %u lies outside of the memory", name, last);
            return false;
        }
    }
    return true;
}

static bool planes_match(const planes *dst, const planes *src) {
    bool match = dst->n == src->n;
    for (size_t p = 0; match && p < dst->n; p++)
        match = dst->at[p].bytes == src->at[p].bytes;
    if (!match)
        PyErr_SetString(PyExc_ValueError, "src_planes: they do not match dst_planes");
    return match;
}

static bool count_is(const Py_buffer *b, size_t n, size_t size, const char *name) {
    if ((size_t)b->len == n * size)
        return true;
    PyErr_Format(PyExc_ValueError, "%s: want %zu entries of %zu bytes, got %zd bytes", name, n, size, b->len);
    return false;
}

// A batch is a range of blocks that one thread works through.
typedef struct batch {
    void (*block)(const struct batch *, size_t i, kvcopy_seg *segs);
    size_t first, end;
    kvcopy_seg *segs; // room for one block
    uint8_t *dst;
    planes dst_planes;
    const uint32_t *dst_ids;
    const uint8_t *src;
    planes src_planes;
    const uint32_t *src_ids;
    const uint64_t *offsets, *headers, *generations;
    const uint32_t *crcs;
    const uint64_t *table;
    uint8_t *status;
} batch;

static void *work(void *arg) {
    batch *b = arg;
    for (size_t i = b->first; i < b->end; i++)
        b->block(b, i, b->segs);
    return NULL;
}

// Runs the blocks 0..n-1, on a second thread too if that is allowed and pays. segs has room for two blocks.
static void run(batch b, size_t n, uint64_t block_bytes, int threads, kvcopy_seg *segs) {
    b.first = 0, b.end = n, b.segs = segs;
    pthread_t other;
    if (threads > 1 && n > 1 && n * block_bytes >= SECOND_THREAD_BYTES) {
        batch half = b;
        half.first = n / 2;
        half.segs = segs + b.dst_planes.n;
        if (pthread_create(&other, NULL, work, &half) == 0) {
            b.end = n / 2;
            work(&b);
            pthread_join(other, NULL);
            return;
        }
    }
    work(&b);
}

static void copy_block(const batch *b, size_t i, kvcopy_seg *segs) {
    for (size_t p = 0; p < b->dst_planes.n; p++) {
        const plane *to = &b->dst_planes.at[p], *from = &b->src_planes.at[p];
        segs[p] = (kvcopy_seg){b->dst + to->base + to->stride * b->dst_ids[i], b->src + from->base + from->stride * b->src_ids[i], to->bytes};
    }
    kvcopy_copy(segs, b->dst_planes.n, NULL, KVCOPY_NT);
}

PyDoc_STRVAR(copy_blocks_doc, "copy_blocks(dst, dst_planes, dst_ids, src, src_planes, src_ids, threads)\n--\n\n"
                              "Copies block src_ids[i] to dst_ids[i]. Planes are packed (base, stride, bytes) as u64, ids as u32.");

static PyObject *copy_blocks(PyObject *self, PyObject *args) {
    (void)self;
    Py_buffer dst, dst_planes, dst_ids, src, src_planes, src_ids;
    int threads;
    if (!PyArg_ParseTuple(args, "w*y*y*y*y*y*i:copy_blocks", &dst, &dst_planes, &dst_ids, &src, &src_planes, &src_ids, &threads))
        return NULL;
    PyObject *result = NULL;
    kvcopy_seg *segs = NULL;
    batch b = {.block = copy_block, .dst = dst.buf, .dst_ids = dst_ids.buf, .src = src.buf, .src_ids = src_ids.buf};
    size_t n = (size_t)dst_ids.len / 4;
    if (!planes_of(&b.dst_planes, &dst_planes, "dst_planes") || !planes_of(&b.src_planes, &src_planes, "src_planes") ||
        !count_is(&dst_ids, n, 4, "dst_ids") || !count_is(&src_ids, n, 4, "src_ids") ||
        !blocks_inside(&b.dst_planes, b.dst_ids, n, &dst, "dst_ids") || !blocks_inside(&b.src_planes, b.src_ids, n, &src, "src_ids") ||
        !planes_match(&b.dst_planes, &b.src_planes))
        goto done;
    if (!(segs = PyMem_RawMalloc(2 * b.dst_planes.n * sizeof *segs))) {
        PyErr_NoMemory();
        goto done;
    }
    Py_BEGIN_ALLOW_THREADS
    run(b, n, b.dst_planes.bytes, threads, segs);
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
done:
    PyMem_RawFree(segs);
    PyBuffer_Release(&dst), PyBuffer_Release(&dst_planes), PyBuffer_Release(&dst_ids);
    PyBuffer_Release(&src), PyBuffer_Release(&src_planes), PyBuffer_Release(&src_ids);
    return result;
}

// What load_blocks says of each block; the same values are in _native.pyi.
enum { LOADED = 0, CHANGED = 1, CORRUPT = 2, SKIPPED = 3 };

static void load_block(const batch *b, size_t i, kvcopy_seg *segs) {
    if (b->status[i] == SKIPPED)
        return;
    const uint64_t *header = (const uint64_t *)(b->src + b->headers[i]);
    if (__atomic_load_n(header, __ATOMIC_ACQUIRE) != b->generations[i]) {
        b->status[i] = CHANGED;
        return;
    }
    const uint8_t *from = b->src + b->offsets[i];
    for (size_t p = 0; p < b->dst_planes.n; p++) {
        const plane *to = &b->dst_planes.at[p];
        segs[p] = (kvcopy_seg){b->dst + to->base + to->stride * b->dst_ids[i], from, to->bytes};
        from += to->bytes;
    }
    uint32_t crc = 0;
    kvcopy_copy(segs, b->dst_planes.n, &crc, KVCOPY_NT);
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    if (__atomic_load_n(header, __ATOMIC_RELAXED) != b->generations[i])
        b->status[i] = CHANGED;
    else
        b->status[i] = crc == b->crcs[i] ? LOADED : CORRUPT;
}

PyDoc_STRVAR(load_blocks_doc, "load_blocks(dst, planes, ids, pool, ready, offsets, headers, generations, crcs, threads) -> bytes\n--\n\n"
                              "Copies blocks out of the pool and checks each one's generation, before and after, and CRC32C.");

static PyObject *load_blocks(PyObject *self, PyObject *args) {
    (void)self;
    Py_buffer dst, packed, ids, pool, ready, offsets, headers, generations, crcs;
    int threads;
    if (!PyArg_ParseTuple(args, "w*y*y*y*y*y*y*y*y*i:load_blocks", &dst, &packed, &ids, &pool, &ready, &offsets, &headers, &generations, &crcs,
                          &threads))
        return NULL;
    PyObject *result = NULL;
    kvcopy_seg *segs = NULL;
    batch b = {.block = load_block, .dst = dst.buf, .dst_ids = ids.buf, .src = pool.buf, .offsets = offsets.buf, .headers = headers.buf,
               .generations = generations.buf, .crcs = crcs.buf};
    size_t n = (size_t)ids.len / 4;
    if (!planes_of(&b.dst_planes, &packed, "planes") || !count_is(&ids, n, 4, "ids") || !blocks_inside(&b.dst_planes, b.dst_ids, n, &dst, "ids") ||
        !count_is(&ready, n, 1, "ready") || !count_is(&offsets, n, 8, "offsets") || !count_is(&headers, n, 8, "headers") ||
        !count_is(&generations, n, 8, "generations") || !count_is(&crcs, n, 4, "crcs"))
        goto done;
    const uint8_t *is_ready = ready.buf;
    for (size_t i = 0; i < n; i++) {
        if (is_ready[i] && (!inside(b.offsets[i], b.dst_planes.bytes, &pool) || !inside(b.headers[i], 8, &pool) || b.headers[i] % 8)) {
            PyErr_Format(PyExc_ValueError, "offsets: block %zu lies outside of the pool", i);
            goto done;
        }
    }
    if (!(segs = PyMem_RawMalloc(2 * b.dst_planes.n * sizeof *segs)) || !(result = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)n))) {
        PyErr_NoMemory();
        goto done;
    }
    b.status = (uint8_t *)PyBytes_AS_STRING(result);
    for (size_t i = 0; i < n; i++)
        b.status[i] = is_ready[i] ? LOADED : SKIPPED;
    Py_BEGIN_ALLOW_THREADS
    run(b, n, b.dst_planes.bytes, threads, segs);
    Py_END_ALLOW_THREADS
done:
    PyMem_RawFree(segs);
    PyBuffer_Release(&dst), PyBuffer_Release(&packed), PyBuffer_Release(&ids), PyBuffer_Release(&pool), PyBuffer_Release(&ready);
    PyBuffer_Release(&offsets), PyBuffer_Release(&headers), PyBuffer_Release(&generations), PyBuffer_Release(&crcs);
    return result;
}

static void load_lent_block(const batch *b, size_t i, kvcopy_seg *segs) {
    if (b->status[i] == SKIPPED)
        return;
    const uint64_t *entry = &b->table[b->src_ids[i]];
    if (__atomic_load_n(entry, __ATOMIC_ACQUIRE) != b->generations[i]) {
        b->status[i] = CHANGED;
        return;
    }
    for (size_t p = 0; p < b->dst_planes.n; p++) {
        const plane *to = &b->dst_planes.at[p], *from = &b->src_planes.at[p];
        segs[p] = (kvcopy_seg){b->dst + to->base + to->stride * b->dst_ids[i], b->src + from->base + from->stride * b->src_ids[i], to->bytes};
    }
    kvcopy_copy(segs, b->dst_planes.n, NULL, KVCOPY_NT);
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    b->status[i] = __atomic_load_n(entry, __ATOMIC_RELAXED) == b->generations[i] ? LOADED : CHANGED;
}

PyDoc_STRVAR(load_lent_doc, "load_lent(dst, dst_planes, dst_ids, src, src_planes, src_ids, table, ready, generations, threads) -> bytes\n--\n\n"
                            "Copies blocks out of another process's KV memory and checks each one's entry of its generation table, before and after.");

static PyObject *load_lent(PyObject *self, PyObject *args) {
    (void)self;
    Py_buffer dst, dst_planes, dst_ids, src, src_planes, src_ids, table, ready, generations;
    int threads;
    if (!PyArg_ParseTuple(args, "w*y*y*y*y*y*y*y*y*i:load_lent", &dst, &dst_planes, &dst_ids, &src, &src_planes, &src_ids, &table, &ready,
                          &generations, &threads))
        return NULL;
    PyObject *result = NULL;
    kvcopy_seg *segs = NULL;
    batch b = {.block = load_lent_block, .dst = dst.buf, .dst_ids = dst_ids.buf, .src = src.buf, .src_ids = src_ids.buf, .table = table.buf,
               .generations = generations.buf};
    size_t n = (size_t)dst_ids.len / 4;
    if (!planes_of(&b.dst_planes, &dst_planes, "dst_planes") || !planes_of(&b.src_planes, &src_planes, "src_planes") ||
        !planes_match(&b.dst_planes, &b.src_planes) || !count_is(&dst_ids, n, 4, "dst_ids") || !count_is(&src_ids, n, 4, "src_ids") ||
        !count_is(&ready, n, 1, "ready") || !count_is(&generations, n, 8, "generations") ||
        !blocks_inside(&b.dst_planes, b.dst_ids, n, &dst, "dst_ids") ||
        !blocks_inside(&b.src_planes, b.src_ids, n, &src, "src_ids"))
        goto done;
    for (size_t i = 0; i < n; i++) {
        if (!inside((uint64_t)b.src_ids[i] * 8, 8, &table)) {
            PyErr_Format(PyExc_ValueError, "src_ids: block %u has no entry in the table", b.src_ids[i]);
            goto done;
        }
    }
    if (!(segs = PyMem_RawMalloc(2 * b.dst_planes.n * sizeof *segs)) || !(result = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)n))) {
        PyErr_NoMemory();
        goto done;
    }
    b.status = (uint8_t *)PyBytes_AS_STRING(result);
    const uint8_t *is_ready = ready.buf;
    for (size_t i = 0; i < n; i++)
        b.status[i] = is_ready[i] ? LOADED : SKIPPED;
    Py_BEGIN_ALLOW_THREADS
    run(b, n, b.dst_planes.bytes, threads, segs);
    Py_END_ALLOW_THREADS
done:
    PyMem_RawFree(segs);
    PyBuffer_Release(&dst), PyBuffer_Release(&dst_planes), PyBuffer_Release(&dst_ids), PyBuffer_Release(&src), PyBuffer_Release(&src_planes);
    PyBuffer_Release(&src_ids), PyBuffer_Release(&table), PyBuffer_Release(&ready), PyBuffer_Release(&generations);
    return result;
}

PyDoc_STRVAR(populate_doc, "populate(memory, offset, length) -> bool\n--\n\n"
                           "Has page tables filled for reading a range of a mapping; False where the kernel cannot.");

static PyObject *populate(PyObject *self, PyObject *args) {
    (void)self;
    Py_buffer memory;
    unsigned long long offset, length;
    if (!PyArg_ParseTuple(args, "y*KK:populate", &memory, &offset, &length))
        return NULL;
    int failed = 1;
    bool fits = inside(offset, length, &memory);
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        failed = madvise((uint8_t *)memory.buf + offset, length, MADV_POPULATE_READ);
        Py_END_ALLOW_THREADS
    } else {
        PyErr_SetString(PyExc_ValueError, "offset: the range lies outside of the memory");
    }
    PyBuffer_Release(&memory);
    return fits ? PyBool_FromLong(!failed) : NULL;
}

static uint64_t *word_at(const Py_buffer *memory, Py_ssize_t offset) {
    if (offset < 0 || offset % 8 || !inside((uint64_t)offset, 8, memory)) {
        PyErr_Format(PyExc_ValueError, "offset: %zd is no place of a word", offset);
        return NULL;
    }
    return (uint64_t *)((uint8_t *)memory->buf + offset);
}

PyDoc_STRVAR(load_u64_doc, "load_u64(memory, offset) -> int\n--\n\nAn acquire load.");

static PyObject *load_u64(PyObject *self, PyObject *args) {
    (void)self;
    Py_buffer memory;
    Py_ssize_t offset;
    if (!PyArg_ParseTuple(args, "y*n:load_u64", &memory, &offset))
        return NULL;
    const uint64_t *word = word_at(&memory, offset);
    PyObject *result = word ? PyLong_FromUnsignedLongLong(__atomic_load_n(word, __ATOMIC_ACQUIRE)) : NULL;
    PyBuffer_Release(&memory);
    return result;
}

PyDoc_STRVAR(store_u64_doc, "store_u64(memory, offset, value)\n--\n\nA release store.");

static PyObject *store_u64(PyObject *self, PyObject *args) {
    (void)self;
    Py_buffer memory;
    Py_ssize_t offset;
    unsigned long long value;
    if (!PyArg_ParseTuple(args, "w*nK:store_u64", &memory, &offset, &value))
        return NULL;
    uint64_t *word = word_at(&memory, offset);
    if (word)
        __atomic_store_n(word, value, __ATOMIC_RELEASE);
    PyBuffer_Release(&memory);
    return word ? Py_NewRef(Py_None) : NULL;
}

PyDoc_STRVAR(swap_u64_doc, "swap_u64(memory, offset, old, new) -> bool\n--\n\nA compare-and-swap; tells whether it won.");

static PyObject *swap_u64(PyObject *self, PyObject *args) {
    (void)self;
    Py_buffer memory;
    Py_ssize_t offset;
    unsigned long long old, new;
    if (!PyArg_ParseTuple(args, "w*nKK:swap_u64", &memory, &offset, &old, &new))
        return NULL;
    uint64_t *word = word_at(&memory, offset);
    uint64_t expected = old;
    bool won = word && __atomic_compare_exchange_n(word, &expected, new, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    PyBuffer_Release(&memory);
    return word ? PyBool_FromLong(won) : NULL;
}

static bool entries_inside(const Py_buffer *ids, const Py_buffer *memory) {
    const uint32_t *id = ids->buf;
    if (ids->len % 4) {
        PyErr_SetString(PyExc_ValueError, "ids: want entries of 4 bytes");
        return false;
    }
    for (Py_ssize_t i = 0; i < ids->len / 4; i++) {
        if (!inside((uint64_t)id[i] * 8, 8, memory)) {
            PyErr_Format(PyExc_ValueError, "ids: %u has no entry", id[i]);
            return false;
        }
    }
    return true;
}

PyDoc_STRVAR(add_u64s_doc, "add_u64s(memory, ids)\n--\n\nAdds 1 to the entries (release).");

static PyObject *add_u64s(PyObject *self, PyObject *args) {
    (void)self;
    Py_buffer memory, ids;
    if (!PyArg_ParseTuple(args, "w*y*:add_u64s", &memory, &ids))
        return NULL;
    bool fits = entries_inside(&ids, &memory);
    uint64_t *entry = memory.buf;
    const uint32_t *id = ids.buf;
    for (Py_ssize_t i = 0; fits && i < ids.len / 4; i++)
        __atomic_fetch_add(&entry[id[i]], 1, __ATOMIC_RELEASE);
    // Nothing that the caller does next may be seen before the new values are.
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    PyBuffer_Release(&memory), PyBuffer_Release(&ids);
    return fits ? Py_NewRef(Py_None) : NULL;
}

PyDoc_STRVAR(load_u64s_doc, "load_u64s(memory, ids) -> bytes\n--\n\nThe entries as u64 (acquire).");

static PyObject *load_u64s(PyObject *self, PyObject *args) {
    (void)self;
    Py_buffer memory, ids;
    if (!PyArg_ParseTuple(args, "y*y*:load_u64s", &memory, &ids))
        return NULL;
    PyObject *result = entries_inside(&ids, &memory) ? PyBytes_FromStringAndSize(NULL, ids.len * 2) : NULL;
    if (result) {
        const uint64_t *entry = memory.buf;
        const uint32_t *id = ids.buf;
        uint64_t *out = (uint64_t *)PyBytes_AS_STRING(result);
        for (Py_ssize_t i = 0; i < ids.len / 4; i++)
            out[i] = __atomic_load_n(&entry[id[i]], __ATOMIC_ACQUIRE);
    }
    PyBuffer_Release(&memory), PyBuffer_Release(&ids);
    return result;
}

PyDoc_STRVAR(crc32c_doc, "crc32c(data, crc=0) -> int\n--\n\nContinues a CRC32C over data.");

static PyObject *crc32c(PyObject *self, PyObject *args) {
    (void)self;
    Py_buffer data;
    unsigned int crc = 0;
    if (!PyArg_ParseTuple(args, "y*|I:crc32c", &data, &crc))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    crc = kvcopy_crc32c(crc, data.buf, (size_t)data.len);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&data);
    return PyLong_FromUnsignedLong(crc);
}

PyDoc_STRVAR(isa_doc, "isa() -> str\n--\n\nNames the instructions that copies use.");

static PyObject *isa(PyObject *self, PyObject *unused) {
    (void)self, (void)unused;
    return PyUnicode_FromString(kvcopy_isa());
}

static PyMethodDef methods[] = {
    {"copy_blocks", copy_blocks, METH_VARARGS, copy_blocks_doc}, {"load_blocks", load_blocks, METH_VARARGS, load_blocks_doc},
    {"load_lent", load_lent, METH_VARARGS, load_lent_doc},       {"load_u64", load_u64, METH_VARARGS, load_u64_doc},
    {"store_u64", store_u64, METH_VARARGS, store_u64_doc},       {"swap_u64", swap_u64, METH_VARARGS, swap_u64_doc},
    {"add_u64s", add_u64s, METH_VARARGS, add_u64s_doc},          {"load_u64s", load_u64s, METH_VARARGS, load_u64s_doc},
    {"crc32c", crc32c, METH_VARARGS, crc32c_doc},                {"populate", populate, METH_VARARGS, populate_doc},
    {"isa", isa, METH_NOARGS, isa_doc},                          {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    .m_base = PyModuleDef_HEAD_INIT, .m_name = "kvferry._native", .m_doc = "Copies, checksums and shared words.", .m_size = 0, .m_methods = methods};

PyMODINIT_FUNC PyInit__native(void) {
    PyObject *m = PyModule_Create(&module);
    if (m && (PyModule_AddIntConstant(m, "LOADED", LOADED) || PyModule_AddIntConstant(m, "CHANGED", CHANGED) ||
              PyModule_AddIntConstant(m, "CORRUPT", CORRUPT) || PyModule_AddIntConstant(m, "SKIPPED", SKIPPED)))
        Py_CLEAR(m);
    return m;
}
