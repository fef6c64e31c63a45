#include "blake3.h"

#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum {
    BLOCK = 64,
    CHUNK = 1024,
    CV = 32,
    LANES = 8,
    MAX_CHUNKS = BLAKE3_MAX_NBYTES / CHUNK,
    CHUNK_START = 1,
    CHUNK_END = 2,
    PARENT = 4,
    ROOT = 8,
    KEYED = 16,
};

static const uint32_t IV[4] = {0x6A09E667U, 0xBB67AE85U, 0x3C6EF372U, 0xA54FF53AU};

/* Which word of the block goes where, by round. */
static const uint8_t SCHEDULE[7][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8},
    {3, 4, 10, 12, 13, 2, 7, 14, 6, 5, 9, 0, 11, 15, 8, 1},
    {10, 7, 12, 9, 14, 3, 13, 15, 4, 0, 11, 2, 5, 8, 1, 6},
    {12, 13, 9, 11, 15, 10, 14, 8, 7, 2, 5, 3, 0, 1, 6, 4},
    {9, 14, 11, 5, 8, 12, 15, 1, 13, 3, 0, 10, 2, 6, 4, 7},
    {11, 15, 5, 0, 1, 9, 8, 6, 14, 10, 2, 12, 3, 4, 7, 13},
};

/* --- one block --------------------------------------------------------------------------- */

static inline uint32_t rotate(uint32_t word, int by) { return word >> by | word << (32 - by); }

static inline void mix(uint32_t v[16], int a, int b, int c, int d, uint32_t x, uint32_t y)
{
    v[a] += v[b] + x;
    v[d] = rotate(v[d] ^ v[a], 16);
    v[c] += v[d];
    v[b] = rotate(v[b] ^ v[c], 12);
    v[a] += v[b] + y;
    v[d] = rotate(v[d] ^ v[a], 8);
    v[c] += v[d];
    v[b] = rotate(v[b] ^ v[c], 7);
}

/* Replace the chaining value by that after one more block; the last one of a chunk may be short. */
static void compress(uint32_t cv[8], const uint8_t *block, size_t nbytes, uint32_t counter,
                     uint32_t flags)
{
    uint32_t m[16] = {0}, v[16];
    memcpy(m, block, nbytes);
    memcpy(v, cv, CV);
    memcpy(v + 8, IV, sizeof IV);
    v[12] = counter;
    v[13] = 0;
    v[14] = (uint32_t)nbytes;
    v[15] = flags;
    for (int round = 0; round < 7; round++) {
        const uint8_t *at = SCHEDULE[round];
        mix(v, 0, 4, 8, 12, m[at[0]], m[at[1]]);
        mix(v, 1, 5, 9, 13, m[at[2]], m[at[3]]);
        mix(v, 2, 6, 10, 14, m[at[4]], m[at[5]]);
        mix(v, 3, 7, 11, 15, m[at[6]], m[at[7]]);
        mix(v, 0, 5, 10, 15, m[at[8]], m[at[9]]);
        mix(v, 1, 6, 11, 12, m[at[10]], m[at[11]]);
        mix(v, 2, 7, 8, 13, m[at[12]], m[at[13]]);
        mix(v, 3, 4, 9, 14, m[at[14]], m[at[15]]);
    }
    for (int i = 0; i < 8; i++)
        cv[i] = v[i] ^ v[i + 8];
}

static void hash_chunk(const uint32_t key[8], const uint8_t *input, size_t nbytes, uint32_t counter,
                       uint32_t last_flags, uint32_t cv[8])
{
    uint32_t flags = KEYED | CHUNK_START;
    memcpy(cv, key, CV);
    for (; nbytes > BLOCK; input += BLOCK, nbytes -= BLOCK, flags = KEYED)
        compress(cv, input, BLOCK, counter, flags);
    compress(cv, input, nbytes, counter, flags | CHUNK_END | last_flags);
}

static void hash_parent(const uint32_t key[8], const uint32_t children[16], uint32_t flags,
                        uint32_t cv[8])
{
    uint8_t block[BLOCK]; /* `cv` may be where the children are */
    memcpy(block, children, BLOCK);
    memcpy(cv, key, CV);
    compress(cv, block, BLOCK, 0, KEYED | PARENT | flags);
}

/* --- eight at once ----------------------------------------------------------------------- */

/* What eight neighbours have in common: `stride` bytes apart, the counter up by `step` from one to the next. */
typedef struct {
    size_t stride;
    int num_blocks;
    uint32_t step, flags, first_flags, last_flags;
} Node;

static const Node CHUNKS = {CHUNK, CHUNK / BLOCK, 1, KEYED, CHUNK_START, CHUNK_END};
static const Node PARENTS = {2 * CV, 1, 0, KEYED | PARENT, 0, 0};

#if defined(__x86_64__)
#define AVX2 __attribute__((target("avx2"), always_inline)) static inline

/* Eight rows of eight words to eight columns. */
AVX2 void transpose(__m256i row[8])
{
    __m256i pair[8], quad[8];
    for (int i = 0; i < 8; i += 2) {
        pair[i] = _mm256_unpacklo_epi32(row[i], row[i + 1]);
        pair[i + 1] = _mm256_unpackhi_epi32(row[i], row[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        quad[i] = _mm256_unpacklo_epi64(pair[i], pair[i + 2]);
        quad[i + 1] = _mm256_unpackhi_epi64(pair[i], pair[i + 2]);
        quad[i + 2] = _mm256_unpacklo_epi64(pair[i + 1], pair[i + 3]);
        quad[i + 3] = _mm256_unpackhi_epi64(pair[i + 1], pair[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        row[i] = _mm256_permute2x128_si256(quad[i], quad[i + 4], 0x20);
        row[i + 4] = _mm256_permute2x128_si256(quad[i], quad[i + 4], 0x31);
    }
}

/* In the compiler's own vectors: it makes one instruction of it where there is one (AVX-512VL). */
AVX2 __m256i rotate_lanes(__m256i word, int by)
{
    typedef uint32_t Lanes __attribute__((vector_size(32)));
    return (__m256i)((Lanes)word >> by | (Lanes)word << (32 - by));
}

AVX2 void mix_lanes(__m256i *a, __m256i *b, __m256i *c, __m256i *d, __m256i x, __m256i y)
{
    *a = _mm256_add_epi32(_mm256_add_epi32(*a, x), *b);
    *d = rotate_lanes(_mm256_xor_si256(*d, *a), 16);
    *c = _mm256_add_epi32(*c, *d);
    *b = rotate_lanes(_mm256_xor_si256(*b, *c), 12);
    *a = _mm256_add_epi32(_mm256_add_epi32(*a, y), *b);
    *d = rotate_lanes(_mm256_xor_si256(*d, *a), 8);
    *c = _mm256_add_epi32(*c, *d);
    *b = rotate_lanes(_mm256_xor_si256(*b, *c), 7);
}

/* Hash eight inputs of whole blocks and write eight chaining values. */
AVX2 void hash_lanes(const uint32_t key[8], const uint8_t *input, const Node *node, uint32_t counter,
                     uint32_t *cvs)
{
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i counters =
        _mm256_add_epi32(_mm256_set1_epi32((int)counter),
                         _mm256_mullo_epi32(lanes, _mm256_set1_epi32((int)node->step)));
    __m256i cv[8];
    for (int i = 0; i < 8; i++)
        cv[i] = _mm256_set1_epi32((int)key[i]);
    for (int b = 0; b < node->num_blocks; b++, input += BLOCK) {
        __m256i m[16], v[16];
        for (int lane = 0; lane < LANES; lane++) {
            const uint8_t *block = input + (size_t)lane * node->stride;
            m[lane] = _mm256_loadu_si256((const __m256i *)block);
            m[lane + 8] = _mm256_loadu_si256((const __m256i *)(block + 32));
            _mm_prefetch((const char *)(block + 256), _MM_HINT_T0);
        }
        transpose(m);
        transpose(m + 8);
        uint32_t flags = node->flags | (b == 0 ? node->first_flags : 0) |
                         (b == node->num_blocks - 1 ? node->last_flags : 0);
        for (int i = 0; i < 8; i++)
            v[i] = cv[i];
        for (int i = 0; i < 4; i++)
            v[i + 8] = _mm256_set1_epi32((int)IV[i]);
        v[12] = counters;
        v[13] = _mm256_setzero_si256();
        v[14] = _mm256_set1_epi32(BLOCK);
        v[15] = _mm256_set1_epi32((int)flags);
#pragma GCC unroll 7
        for (int round = 0; round < 7; round++) {
            const uint8_t *at = SCHEDULE[round];
            mix_lanes(&v[0], &v[4], &v[8], &v[12], m[at[0]], m[at[1]]);
            mix_lanes(&v[1], &v[5], &v[9], &v[13], m[at[2]], m[at[3]]);
            mix_lanes(&v[2], &v[6], &v[10], &v[14], m[at[4]], m[at[5]]);
            mix_lanes(&v[3], &v[7], &v[11], &v[15], m[at[6]], m[at[7]]);
            mix_lanes(&v[0], &v[5], &v[10], &v[15], m[at[8]], m[at[9]]);
            mix_lanes(&v[1], &v[6], &v[11], &v[12], m[at[10]], m[at[11]]);
            mix_lanes(&v[2], &v[7], &v[8], &v[13], m[at[12]], m[at[13]]);
            mix_lanes(&v[3], &v[4], &v[9], &v[14], m[at[14]], m[at[15]]);
        }
        for (int i = 0; i < 8; i++)
            cv[i] = _mm256_xor_si256(v[i], v[i + 8]);
    }
    transpose(cv);
    for (int lane = 0; lane < LANES; lane++)
        _mm256_storeu_si256((__m256i *)(cvs + 8 * lane), cv[lane]);
}

__attribute__((target("avx2"))) static void hash_eight_avx2(const uint32_t key[8],
                                                            const uint8_t *input, const Node *node,
                                                            uint32_t counter, uint32_t *cvs)
{
    hash_lanes(key, input, node, counter, cvs);
}

/* The same with more registers, and rotations in one instruction. */
__attribute__((target("avx2,avx512f,avx512vl"))) static void hash_eight_avx512(
    const uint32_t key[8], const uint8_t *input, const Node *node, uint32_t counter, uint32_t *cvs)
{
    hash_lanes(key, input, node, counter, cvs);
}
#endif

static void (*hash_eight)(const uint32_t key[8], const uint8_t *input, const Node *node,
                          uint32_t counter, uint32_t *cvs) = NULL;

void blake3_init(void)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl"))
        hash_eight = hash_eight_avx512;
    else if (__builtin_cpu_supports("avx2"))
        hash_eight = hash_eight_avx2;
#endif
}

bool blake3_fast(void) { return hash_eight != NULL; }

/* --- the tree ---------------------------------------------------------------------------- */

static size_t hash_chunks(const uint32_t key[8], const uint8_t *input, size_t nbytes, uint32_t *cvs)
{
    size_t num_chunks = (nbytes + CHUNK - 1) / CHUNK, done = 0;
    for (; hash_eight && done + LANES <= nbytes / CHUNK; done += LANES)
        hash_eight(key, input + done * CHUNK, &CHUNKS, (uint32_t)done, cvs + 8 * done);
    for (; done < num_chunks; done++) {
        size_t left = nbytes - done * CHUNK;
        hash_chunk(key, input + done * CHUNK, left < CHUNK ? left : CHUNK, (uint32_t)done, 0,
                   cvs + 8 * done);
    }
    return num_chunks;
}

/* Replace neighbours by their parents, in place; an odd last one goes up as it is. */
static size_t hash_parents(const uint32_t key[8], uint32_t *cvs, size_t num)
{
    size_t pairs = num / 2, done = 0;
    for (; hash_eight && done + LANES <= pairs; done += LANES) /* all is read before it is written */
        hash_eight(key, (const uint8_t *)(cvs + 16 * done), &PARENTS, 0, cvs + 8 * done);
    for (; done < pairs; done++)
        hash_parent(key, cvs + 16 * done, 0, cvs + 8 * done);
    if (num % 2)
        memmove(cvs + 8 * pairs, cvs + 16 * pairs, CV);
    return pairs + num % 2;
}

void blake3_keyed(const uint8_t key_bytes[BLAKE3_KEY_NBYTES], const uint8_t *input, size_t nbytes,
                  uint8_t digest[BLAKE3_ROW_DIGEST_NBYTES])
{
    uint32_t key[8], root[8], cvs[8 * MAX_CHUNKS];
    memcpy(key, key_bytes, sizeof key);
    if (nbytes <= CHUNK) {
        hash_chunk(key, input, nbytes, 0, ROOT, root);
    } else {
        size_t num = hash_chunks(key, input, nbytes, cvs);
        while (num > 2)
            num = hash_parents(key, cvs, num);
        hash_parent(key, cvs, ROOT, root);
    }
    memcpy(digest, root, BLAKE3_ROW_DIGEST_NBYTES);
}
