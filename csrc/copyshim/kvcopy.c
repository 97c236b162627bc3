#include "kvcopy.h"

#include <string.h>

// A kernel copies len bytes and returns the CRC state (not inverted) continued over them. What it does besides is chosen by flags that are
// constants at every call, so that each kernel is compiled once for each set of them.
enum {
    STORE = 1, // write dst; without it only the CRC is made
    SUM = 2,   // make the CRC
    NT = 4,    // bypass the cache
};

typedef uint32_t kernel(void *dst, const void *src, size_t len, uint32_t state);

typedef struct {
    const char *isa;
    kernel *copy;        // STORE
    kernel *copy_nt;     // STORE | NT
    kernel *copy_sum;    // STORE | SUM
    kernel *copy_sum_nt; // STORE | SUM | NT
    kernel *sum;         // SUM
} kernels;

// Below this many bytes in a batch the destination is likely to be read from the cache soon.
#define NT_BATCH_BYTES (64 * 1024)
// Shorter segments spend their time at the unaligned ends.
#define NT_SEGMENT_BYTES 1024

// ---- portable: eight tables of 256 entries ----

#define POLY 0x82f63b78u // Castagnoli, reflected

static uint32_t table[8][256];

static void fill_table(void) {
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t v = i;
        for (int bit = 0; bit < 8; bit++)
            v = v >> 1 ^ (v & 1 ? POLY : 0);
        table[0][i] = v;
    }
    for (int t = 1; t < 8; t++)
        for (int i = 0; i < 256; i++)
            table[t][i] = table[t - 1][i] >> 8 ^ table[0][table[t - 1][i] & 0xff];
}

// Keeps the compiler from reading memory again for a value that another process may change.
#define ONCE(v) __asm__ volatile("" : "+r"(v))

static inline __attribute__((always_inline)) uint32_t portable(uint8_t *dst, const uint8_t *src, size_t len, uint32_t state, int flags) {
    for (; len >= 8; len -= 8, src += 8, dst += 8) {
        uint64_t v;
        memcpy(&v, src, 8);
        ONCE(v);
        if (flags & STORE)
            memcpy(dst, &v, 8);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
        v = __builtin_bswap64(v);
#endif
        v ^= state;
        state = table[7][v & 0xff] ^ table[6][v >> 8 & 0xff] ^ table[5][v >> 16 & 0xff] ^ table[4][v >> 24 & 0xff] ^
                table[3][v >> 32 & 0xff] ^ table[2][v >> 40 & 0xff] ^ table[1][v >> 48 & 0xff] ^ table[0][v >> 56];
    }
    for (; len; len--, src++, dst++) {
        unsigned v = *src;
        ONCE(v);
        if (flags & STORE)
            *dst = (uint8_t)v;
        state = state >> 8 ^ table[0][(state ^ v) & 0xff];
    }
    return state;
}

static uint32_t portable_copy_sum(void *dst, const void *src, size_t len, uint32_t state) {
    return portable(dst, src, len, state, STORE | SUM);
}

static uint32_t portable_sum(void *dst, const void *src, size_t len, uint32_t state) {
    return portable(dst, src, len, state, SUM);
}

static uint32_t plain_copy(void *dst, const void *src, size_t len, uint32_t state) {
    memcpy(dst, src, len);
    return state;
}

static kernels chosen = {"portable", plain_copy, plain_copy, portable_copy_sum, portable_copy_sum, portable_sum};

#if defined(__x86_64__)

#include <immintrin.h>

// CRC by folding (Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel 2009): a register of
// 128 bits is carried D bits ahead by multiplying its halves with x^(D+63) and x^(D-1) mod P, both reflected, in the upper half of
// their 64 bits. (One less than the distance, since the product of two reflected numbers lies one bit too low.)
#define FOLD_128 0x3171d43000000000, 0x3743f7bd00000000
#define FOLD_512 0x75bba45b00000000, 0x1c19243b00000000
#define FOLD_1024 0x7417153f00000000, 0x6577b24500000000
#define FOLD_2048 0x1426a81500000000, 0xe9a5d8be00000000

#define SSE_TARGET __attribute__((target("sse4.2,pclmul")))
#define AVX512_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,vpclmulqdq,pclmul,sse4.2")))
#define INLINE static inline __attribute__((always_inline))

// The ends of a segment, and segments that are too short to fold.
INLINE SSE_TARGET uint32_t short_copy(uint8_t *dst, const uint8_t *src, size_t len, uint32_t state, int flags) {
    uint64_t wide = state;
    for (; len >= 8; len -= 8, src += 8, dst += 8) {
        uint64_t v;
        memcpy(&v, src, 8);
        ONCE(v);
        if (flags & STORE)
            memcpy(dst, &v, 8);
        if (flags & SUM)
            wide = _mm_crc32_u64(wide, v);
    }
    state = (uint32_t)wide;
    for (; len; len--, src++, dst++) {
        unsigned v = *src;
        ONCE(v);
        if (flags & STORE)
            *dst = (uint8_t)v;
        if (flags & SUM)
            state = _mm_crc32_u8(state, (uint8_t)v);
    }
    return state;
}

INLINE SSE_TARGET __m128i fold(__m128i a, __m128i k, __m128i next) {
    __m128i product = _mm_xor_si128(_mm_clmulepi64_si128(a, k, 0x11), _mm_clmulepi64_si128(a, k, 0x00));
    return _mm_xor_si128(product, next);
}

// The CRC state that 128 folded bits stand for.
INLINE SSE_TARGET uint32_t reduce(__m128i a) {
    uint64_t state = _mm_crc32_u64(0, (uint64_t)_mm_cvtsi128_si64(a));
    return (uint32_t)_mm_crc32_u64(state, (uint64_t)_mm_extract_epi64(a, 1));
}

#define SSE_STEP 128

INLINE SSE_TARGET uint32_t sse(uint8_t *dst, const uint8_t *src, size_t len, uint32_t state, int flags) {
    if (flags & STORE) {
        size_t head = -(uintptr_t)dst & 15;
        if (len < head + SSE_STEP)
            return short_copy(dst, src, len, state, flags);
        state = short_copy(dst, src, head, state, flags);
        dst += head, src += head, len -= head;
    } else if (len < SSE_STEP) {
        return short_copy(dst, src, len, state, flags);
    }

    const __m128i ahead = _mm_set_epi64x(FOLD_1024);
    __m128i a[8];
    for (int i = 0; i < 8; i++)
        a[i] = _mm_setzero_si128();
    __m128i carry = _mm_cvtsi32_si128((int)state);
    for (; len >= SSE_STEP; len -= SSE_STEP, src += SSE_STEP, dst += SSE_STEP) {
        _mm_prefetch((const char *)src + 1024, _MM_HINT_T0);
        _mm_prefetch((const char *)src + 1088, _MM_HINT_T0);
        for (int i = 0; i < 8; i++) {
            __m128i v = _mm_loadu_si128((const __m128i *)(src + 16 * i));
            if (flags & NT)
                _mm_stream_si128((__m128i *)(dst + 16 * i), v);
            else if (flags & STORE)
                _mm_store_si128((__m128i *)(dst + 16 * i), v);
            if (flags & SUM)
                a[i] = fold(a[i], ahead, v);
        }
        a[0] = _mm_xor_si128(a[0], carry);
        carry = _mm_setzero_si128();
    }
    if (flags & SUM) {
        const __m128i one = _mm_set_epi64x(FOLD_128);
        for (int i = 1; i < 8; i++)
            a[i] = fold(a[i - 1], one, a[i]);
        state = reduce(a[7]);
    }
    return short_copy(dst, src, len, state, flags);
}

#define AVX512_STEP 256

INLINE AVX512_TARGET __m512i fold512(__m512i a, __m512i k, __m512i next) {
    return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(a, k, 0x11), _mm512_clmulepi64_epi128(a, k, 0x00), next, 0x96);
}

INLINE AVX512_TARGET uint32_t avx512(uint8_t *dst, const uint8_t *src, size_t len, uint32_t state, int flags) {
    if (flags & STORE) {
        size_t head = -(uintptr_t)dst & 63;
        if (len < head + AVX512_STEP)
            return short_copy(dst, src, len, state, flags);
        state = short_copy(dst, src, head, state, flags);
        dst += head, src += head, len -= head;
    } else if (len < AVX512_STEP) {
        return short_copy(dst, src, len, state, flags);
    }

    const __m512i ahead = _mm512_broadcast_i32x4(_mm_set_epi64x(FOLD_2048));
    __m512i a[4];
    for (int i = 0; i < 4; i++)
        a[i] = _mm512_setzero_si512();
    __m512i carry = _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)state));
    for (; len >= AVX512_STEP; len -= AVX512_STEP, src += AVX512_STEP, dst += AVX512_STEP) {
        for (int i = 0; i < 4; i++) {
            _mm_prefetch((const char *)src + 2048 + 64 * i, _MM_HINT_T0);
            __m512i v = _mm512_loadu_si512(src + 64 * i);
            if (flags & NT)
                _mm512_stream_si512((__m512i *)(dst + 64 * i), v);
            else if (flags & STORE)
                _mm512_store_si512(dst + 64 * i, v);
            if (flags & SUM)
                a[i] = fold512(a[i], ahead, v);
        }
        a[0] = _mm512_xor_si512(a[0], carry);
        carry = _mm512_setzero_si512();
    }
    if (flags & SUM) {
        const __m512i four = _mm512_broadcast_i32x4(_mm_set_epi64x(FOLD_512));
        for (int i = 1; i < 4; i++)
            a[i] = fold512(a[i - 1], four, a[i]);
        const __m128i one = _mm_set_epi64x(FOLD_128);
        __m128i x = _mm512_extracti32x4_epi32(a[3], 0);
        x = fold(x, one, _mm512_extracti32x4_epi32(a[3], 1));
        x = fold(x, one, _mm512_extracti32x4_epi32(a[3], 2));
        x = fold(x, one, _mm512_extracti32x4_epi32(a[3], 3));
        state = reduce(x);
    }
    return short_copy(dst, src, len, state, flags);
}

#define KERNEL(name, target, body, flags) \
    static target uint32_t name(void *dst, const void *src, size_t len, uint32_t state) { return body(dst, src, len, state, flags); }

KERNEL(sse_copy_nt, SSE_TARGET, sse, STORE | NT)
KERNEL(sse_copy_sum, SSE_TARGET, sse, STORE | SUM)
KERNEL(sse_copy_sum_nt, SSE_TARGET, sse, STORE | SUM | NT)
KERNEL(sse_sum, SSE_TARGET, sse, SUM)
KERNEL(avx512_copy_nt, AVX512_TARGET, avx512, STORE | NT)
KERNEL(avx512_copy_sum, AVX512_TARGET, avx512, STORE | SUM)
KERNEL(avx512_copy_sum_nt, AVX512_TARGET, avx512, STORE | SUM | NT)
KERNEL(avx512_sum, AVX512_TARGET, avx512, SUM)

static void store_fence(void) { _mm_sfence(); }

static void choose(void) {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("vpclmulqdq"))
        chosen = (kernels){"avx512-vpclmul", plain_copy, avx512_copy_nt, avx512_copy_sum, avx512_copy_sum_nt, avx512_sum};
    else if (__builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul"))
        chosen = (kernels){"sse-pclmul", plain_copy, sse_copy_nt, sse_copy_sum, sse_copy_sum_nt, sse_sum};
}

#else

static void store_fence(void) {}
static void choose(void) {}

#endif

static __attribute__((constructor)) void init(void) {
    fill_table();
    choose();
}

void kvcopy_copy(const kvcopy_seg *segs, size_t n, uint32_t *crc, unsigned flags) {
    size_t bytes = 0;
    for (size_t i = 0; i < n; i++)
        bytes += segs[i].len;
    int nt = flags & KVCOPY_NT && bytes >= NT_BATCH_BYTES;
    kernel *narrow = crc ? chosen.copy_sum : chosen.copy;
    kernel *wide = !nt ? narrow : crc ? chosen.copy_sum_nt : chosen.copy_nt;
    uint32_t state = crc ? ~*crc : 0;
    for (size_t i = 0; i < n; i++) {
        kernel *k = segs[i].len >= NT_SEGMENT_BYTES ? wide : narrow;
        state = k(segs[i].dst, segs[i].src, segs[i].len, state);
    }
    if (nt)
        store_fence();
    if (crc)
        *crc = ~state;
}

uint32_t kvcopy_crc32c(uint32_t crc, const void *p, size_t len) { return ~chosen.sum(NULL, p, len, ~crc); }

const char *kvcopy_isa(void) { return chosen.isa; }
