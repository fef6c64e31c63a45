#include "xxh3.h"

#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "big endian: not supported"
#endif

enum { STRIPE = 64, STRIPES_PER_BLOCK = 16, BLOCK = STRIPE * STRIPES_PER_BLOCK, SECRET = 192 };

static const uint64_t PRIME32_1 = 0x9E3779B1U, PRIME32_2 = 0x85EBCA77U, PRIME32_3 = 0xC2B2AE3DU;
static const uint64_t PRIME64_1 = 0x9E3779B185EBCA87ULL, PRIME64_2 = 0xC2B2AE3D27D4EB4FULL,
                      PRIME64_3 = 0x165667B19E3779F9ULL, PRIME64_4 = 0x85EBCA77C2B2AE63ULL,
                      PRIME64_5 = 0x27D4EB2F165667C5ULL;
static const uint64_t PRIME_MX1 = 0x165667919E3779F9ULL;

static const uint8_t SECRET_BYTES[SECRET] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static inline uint64_t read64(const uint8_t *at)
{
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static void accumulate_plain(uint64_t acc[8], const uint8_t *input, size_t num_stripes)
{
    for (size_t n = 0; n < num_stripes; n++) {
        const uint8_t *data = input + n * STRIPE, *secret = SECRET_BYTES + 8 * n;
        for (int i = 0; i < 8; i++) {
            uint64_t value = read64(data + 8 * i), key = value ^ read64(secret + 8 * i);
            acc[i ^ 1] += value;
            acc[i] += (key & 0xFFFFFFFFU) * (key >> 32);
        }
    }
}

static void hash_blocks_plain(uint64_t acc[8], const uint8_t *input, size_t num_blocks)
{
    for (size_t b = 0; b < num_blocks; b++) {
        accumulate_plain(acc, input + b * BLOCK, STRIPES_PER_BLOCK);
        for (int i = 0; i < 8; i++) {
            acc[i] ^= acc[i] >> 47;
            acc[i] ^= read64(SECRET_BYTES + SECRET - STRIPE + 8 * i);
            acc[i] *= PRIME32_1;
        }
    }
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) static void hash_blocks_avx2(uint64_t acc[8], const uint8_t *input,
                                                             size_t num_blocks)
{
    __m256i sum[2] = {_mm256_loadu_si256((const __m256i *)acc),
                      _mm256_loadu_si256((const __m256i *)(acc + 4))};
    const __m256i prime = _mm256_set1_epi64x((long long)PRIME32_1);
    for (size_t b = 0; b < num_blocks; b++) {
        for (int n = 0; n < STRIPES_PER_BLOCK; n++) {
            const uint8_t *data = input + b * BLOCK + n * STRIPE, *secret = SECRET_BYTES + 8 * n;
            /* Eight lines ahead of the sum: one row is not enough for the hardware to find its pace. */
            _mm_prefetch((const char *)(data + 512), _MM_HINT_T0);
            for (int half = 0; half < 2; half++) {
                __m256i value = _mm256_loadu_si256((const __m256i *)(data + 32 * half));
                __m256i key = _mm256_xor_si256(
                    value, _mm256_loadu_si256((const __m256i *)(secret + 32 * half)));
                __m256i product = _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32));
                __m256i swapped = _mm256_shuffle_epi32(value, 0x4E);
                sum[half] = _mm256_add_epi64(sum[half], _mm256_add_epi64(product, swapped));
            }
        }
        for (int half = 0; half < 2; half++) {
            const uint8_t *secret = SECRET_BYTES + SECRET - STRIPE + 32 * half;
            __m256i x = _mm256_xor_si256(sum[half], _mm256_srli_epi64(sum[half], 47));
            x = _mm256_xor_si256(x, _mm256_loadu_si256((const __m256i *)secret));
            __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), prime);
            sum[half] =
                _mm256_add_epi64(_mm256_mul_epu32(x, prime), _mm256_slli_epi64(high, 32));
        }
    }
    _mm256_storeu_si256((__m256i *)acc, sum[0]);
    _mm256_storeu_si256((__m256i *)(acc + 4), sum[1]);
}
#elif defined(__aarch64__)
static void hash_blocks_neon(uint64_t acc[8], const uint8_t *input, size_t num_blocks)
{
    uint64x2_t sum[4];
    const uint32x2_t prime = vdup_n_u32((uint32_t)PRIME32_1);
    for (int i = 0; i < 4; i++)
        sum[i] = vld1q_u64(acc + 2 * i);
    for (size_t b = 0; b < num_blocks; b++) {
        for (int n = 0; n < STRIPES_PER_BLOCK; n++) {
            const uint8_t *data = input + b * BLOCK + n * STRIPE, *secret = SECRET_BYTES + 8 * n;
            __builtin_prefetch(data + 512);
            for (int i = 0; i < 4; i++) {
                uint64x2_t value = vreinterpretq_u64_u8(vld1q_u8(data + 16 * i));
                uint64x2_t key = veorq_u64(value, vreinterpretq_u64_u8(vld1q_u8(secret + 16 * i)));
                sum[i] = vaddq_u64(sum[i], vextq_u64(value, value, 1));
                sum[i] = vmlal_u32(sum[i], vmovn_u64(key), vshrn_n_u64(key, 32));
            }
        }
        for (int i = 0; i < 4; i++) {
            const uint8_t *secret = SECRET_BYTES + SECRET - STRIPE + 16 * i;
            uint64x2_t x = veorq_u64(sum[i], vshrq_n_u64(sum[i], 47));
            x = veorq_u64(x, vreinterpretq_u64_u8(vld1q_u8(secret)));
            uint64x2_t high = vmull_u32(vshrn_n_u64(x, 32), prime);
            sum[i] = vmlal_u32(vshlq_n_u64(high, 32), vmovn_u64(x), prime);
        }
    }
    for (int i = 0; i < 4; i++)
        vst1q_u64(acc + 2 * i, sum[i]);
}
#endif

static void (*hash_blocks)(uint64_t acc[8], const uint8_t *input, size_t num_blocks) =
    hash_blocks_plain;

void xxh3_init(void)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2"))
        hash_blocks = hash_blocks_avx2;
#elif defined(__aarch64__)
    hash_blocks = hash_blocks_neon; /* every such CPU has it */
#endif
}

static uint64_t fold(uint64_t a, uint64_t b)
{
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint64_t avalanche(uint64_t hash)
{
    hash ^= hash >> 37;
    hash *= PRIME_MX1;
    return hash ^ (hash >> 32);
}

static void sum(uint64_t acc[8], const uint8_t *input, size_t nbytes)
{
    const uint64_t start[8] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3,
                               PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    memcpy(acc, start, sizeof start);
    size_t num_blocks = (nbytes - 1) / BLOCK;
    hash_blocks(acc, input, num_blocks);
    accumulate_plain(acc, input + num_blocks * BLOCK, (nbytes - 1 - num_blocks * BLOCK) / STRIPE);

    /* The last stripe may overlap the one before, and has a place of its own in the secret. */
    const uint8_t *last = input + nbytes - STRIPE, *secret = SECRET_BYTES + SECRET - STRIPE - 7;
    for (int i = 0; i < 8; i++) {
        uint64_t value = read64(last + 8 * i), key = value ^ read64(secret + 8 * i);
        acc[i ^ 1] += value;
        acc[i] += (key & 0xFFFFFFFFU) * (key >> 32);
    }
}

uint64_t xxh3_64(const uint8_t *input, size_t nbytes)
{
    uint64_t acc[8], hash = nbytes * PRIME64_1;
    sum(acc, input, nbytes);
    for (int i = 0; i < 4; i++) {
        const uint8_t *secret = SECRET_BYTES + 11 + 16 * i;
        hash += fold(acc[2 * i] ^ read64(secret), acc[2 * i + 1] ^ read64(secret + 8));
    }
    return avalanche(hash);
}
