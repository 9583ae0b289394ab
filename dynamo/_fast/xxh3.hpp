// XXH3, 64-bit output with a numeric seed, written from the public description of the algorithm
// (xxhash_spec.md, "XXH3 Algorithm Overview"). Byte-exact with every other implementation.
//
// A `Hasher` derives the seeded secret once, so that a prompt's thousand blocks share it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "hashes are defined over little-endian words");

namespace dynamo::xxh3 {

inline constexpr uint64_t PRIME32_1 = 0x9E3779B1u;
inline constexpr uint64_t PRIME32_2 = 0x85EBCA77u;
inline constexpr uint64_t PRIME32_3 = 0xC2B2AE3Du;
inline constexpr uint64_t PRIME64_1 = 0x9E3779B185EBCA87u;
inline constexpr uint64_t PRIME64_2 = 0xC2B2AE3D27D4EB4Fu;
inline constexpr uint64_t PRIME64_3 = 0x165667B19E3779F9u;
inline constexpr uint64_t PRIME64_4 = 0x85EBCA77C2B2AE63u;
inline constexpr uint64_t PRIME64_5 = 0x27D4EB2F165667C5u;
inline constexpr uint64_t PRIME_MX1 = 0x165667919E3779F9u;
inline constexpr uint64_t PRIME_MX2 = 0x9FB21C651E98DF25u;

inline constexpr size_t SECRET_BYTES = 192;
inline constexpr size_t STRIPE_BYTES = 64;
inline constexpr size_t LANES = STRIPE_BYTES / 8;
inline constexpr size_t STRIPES_PER_CHUNK = (SECRET_BYTES - STRIPE_BYTES) / 8;
inline constexpr size_t CHUNK_BYTES = STRIPES_PER_CHUNK * STRIPE_BYTES;

alignas(64) inline constexpr uint8_t DEFAULT_SECRET[SECRET_BYTES] = {
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

inline uint32_t load32(const uint8_t *at) {
    uint32_t word;
    std::memcpy(&word, at, sizeof word);
    return word;
}

inline uint64_t load64(const uint8_t *at) {
    uint64_t word;
    std::memcpy(&word, at, sizeof word);
    return word;
}

inline uint64_t rotate_left(uint64_t word, unsigned bits) {
    return (word << bits) | (word >> (64 - bits));
}

// High and low half of the 128-bit product, folded together.
inline uint64_t multiply_fold(uint64_t left, uint64_t right) {
    unsigned __int128 product = static_cast<unsigned __int128>(left) * right;
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

inline uint64_t avalanche(uint64_t hash) {
    hash ^= hash >> 37;
    hash *= PRIME_MX1;
    return hash ^ (hash >> 32);
}

// The final mix of the older XXH64, which XXH3 keeps for inputs of 0 to 3 bytes.
inline uint64_t avalanche_xxh64(uint64_t hash) {
    hash ^= hash >> 33;
    hash *= PRIME64_2;
    hash ^= hash >> 29;
    hash *= PRIME64_3;
    return hash ^ (hash >> 32);
}

class Hasher {
public:
    explicit Hasher(uint64_t seed) : seed_(seed) {
        for (size_t at = 0; at < SECRET_BYTES; at += 16) {
            uint64_t low = load64(DEFAULT_SECRET + at) + seed;
            uint64_t high = load64(DEFAULT_SECRET + at + 8) - seed;
            std::memcpy(secret_ + at, &low, sizeof low);
            std::memcpy(secret_ + at + 8, &high, sizeof high);
        }
    }

    uint64_t operator()(const void *input, size_t size) const {
        const uint8_t *data = static_cast<const uint8_t *>(input);
        if (size > 240) return hash_long(data, size);
        if (size > 128) return hash_129_to_240(data, size);
        if (size > 16) return hash_17_to_128(data, size);
        if (size > 8) return hash_9_to_16(data, size);
        if (size >= 4) return hash_4_to_8(data, size);
        return hash_0_to_3(data, size);
    }

    // Hashes of `count` windows of `size` bytes that start `stride` bytes apart. Block sizes that
    // engines use get a copy of the loop in which the compiler knows the size.
    void windows(const uint8_t *data, size_t count, size_t size, size_t stride, uint64_t *out) const {
        switch (size) {
        case 64: return windows_of<64>(data, count, stride, out);     // 16 tokens
        case 128: return windows_of<128>(data, count, stride, out);   // 32 tokens
        case 256: return windows_of<256>(data, count, stride, out);   // 64 tokens
        case 512: return windows_of<512>(data, count, stride, out);   // 128 tokens
        default:
            for (size_t i = 0; i < count; i++) out[i] = (*this)(data + i * stride, size);
        }
    }

    // out[0] = words[0]; out[i] = hash(out[i-1] then words[i]): a chain over u64 words.
    void chain(const uint8_t *words, size_t count, uint64_t *out) const {
        uint64_t previous = 0;
        for (size_t i = 0; i < count; i++) {
            uint64_t word = load64(words + 8 * i);
            previous = i ? hash_two_words(previous, word, 16) : word;
            out[i] = previous;
        }
    }

private:
    template <size_t SIZE>
    void windows_of(const uint8_t *data, size_t count, size_t stride, uint64_t *out) const {
        const Hasher local(*this);  // a copy the compiler knows `out` does not alias
        for (size_t i = 0; i < count; i++) out[i] = local(data + i * stride, SIZE);
    }

    uint64_t hash_0_to_3(const uint8_t *data, size_t size) const {
        const uint8_t *secret = DEFAULT_SECRET;
        if (size == 0) return avalanche_xxh64(seed_ ^ load64(secret + 56) ^ load64(secret + 64));
        uint32_t combined = (uint32_t{data[0]} << 16) | (uint32_t{data[size >> 1]} << 24) |
                            uint32_t{data[size - 1]} | static_cast<uint32_t>(size << 8);
        uint64_t flip = uint64_t{load32(secret) ^ load32(secret + 4)} + seed_;
        return avalanche_xxh64(combined ^ flip);
    }

    uint64_t hash_4_to_8(const uint8_t *data, size_t size) const {
        const uint8_t *secret = DEFAULT_SECRET;
        uint64_t swapped = uint64_t{__builtin_bswap32(static_cast<uint32_t>(seed_))} << 32;
        uint64_t flip = (load64(secret + 8) ^ load64(secret + 16)) - (seed_ ^ swapped);
        uint64_t hash = (load32(data + size - 4) + (uint64_t{load32(data)} << 32)) ^ flip;
        hash ^= rotate_left(hash, 49) ^ rotate_left(hash, 24);
        hash *= PRIME_MX2;
        hash ^= (hash >> 35) + size;
        hash *= PRIME_MX2;
        return hash ^ (hash >> 28);
    }

    uint64_t hash_9_to_16(const uint8_t *data, size_t size) const {
        return hash_two_words(load64(data), load64(data + size - 8), size);
    }

    uint64_t hash_two_words(uint64_t first, uint64_t last, size_t size) const {
        const uint8_t *secret = DEFAULT_SECRET;
        uint64_t low = first ^ ((load64(secret + 24) ^ load64(secret + 32)) + seed_);
        uint64_t high = last ^ ((load64(secret + 40) ^ load64(secret + 48)) - seed_);
        return avalanche(size + __builtin_bswap64(low) + high + multiply_fold(low, high));
    }

    // 16 bytes of input against 16 bytes of a secret that already holds the seed.
    static uint64_t mix16(const uint8_t *data, const uint8_t *secret) {
        return multiply_fold(load64(data) ^ load64(secret), load64(data + 8) ^ load64(secret + 8));
    }

    // The same where the secret is read at an odd offset, so that the seed has to be added here.
    uint64_t mix16_seeded(const uint8_t *data, const uint8_t *secret) const {
        return multiply_fold(load64(data) ^ (load64(secret) + seed_),
                             load64(data + 8) ^ (load64(secret + 8) - seed_));
    }

    uint64_t hash_17_to_128(const uint8_t *data, size_t size) const {
        const uint8_t *end = data + size;
        uint64_t hash = size * PRIME64_1;
        if (size > 96) hash += mix16(data + 48, secret_ + 96) + mix16(end - 64, secret_ + 112);
        if (size > 64) hash += mix16(data + 32, secret_ + 64) + mix16(end - 48, secret_ + 80);
        if (size > 32) hash += mix16(data + 16, secret_ + 32) + mix16(end - 32, secret_ + 48);
        hash += mix16(data, secret_) + mix16(end - 16, secret_ + 16);
        return avalanche(hash);
    }

    uint64_t hash_129_to_240(const uint8_t *data, size_t size) const {
        uint64_t hash = size * PRIME64_1;
        for (size_t i = 0; i < 8; i++) hash += mix16(data + 16 * i, secret_ + 16 * i);
        hash = avalanche(hash);
        for (size_t i = 8; i < size / 16; i++)
            hash += mix16_seeded(data + 16 * i, DEFAULT_SECRET + 16 * (i - 8) + 3);
        hash += mix16_seeded(data + size - 16, DEFAULT_SECRET + 136 - 17);
        return avalanche(hash);
    }

    struct Lanes {
        alignas(64) uint64_t lane[LANES] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3,
                                            PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};

        void stripe(const uint8_t *data, const uint8_t *secret) {
            uint64_t value[LANES], key[LANES];
            for (size_t i = 0; i < LANES; i++) value[i] = load64(data + 8 * i);
            for (size_t i = 0; i < LANES; i++) key[i] = value[i] ^ load64(secret + 8 * i);
            for (size_t i = 0; i < LANES; i++)
                lane[i] += value[i ^ 1] + (key[i] & 0xFFFFFFFFu) * (key[i] >> 32);
        }

        void scramble(const uint8_t *secret) {
            for (size_t i = 0; i < LANES; i++)
                lane[i] = (lane[i] ^ (lane[i] >> 47) ^ load64(secret + 8 * i)) * PRIME32_1;
        }

        uint64_t merge(const uint8_t *secret, uint64_t hash) const {
            for (size_t i = 0; i < LANES; i += 2)
                hash += multiply_fold(lane[i] ^ load64(secret + 8 * i),
                                      lane[i + 1] ^ load64(secret + 8 * i + 8));
            return avalanche(hash);
        }
    };

    uint64_t hash_long(const uint8_t *data, size_t size) const {
        Lanes lanes;
        size_t chunks = (size - 1) / CHUNK_BYTES;
        for (size_t c = 0; c < chunks; c++) {
            for (size_t s = 0; s < STRIPES_PER_CHUNK; s++)
                lanes.stripe(data + c * CHUNK_BYTES + s * STRIPE_BYTES, secret_ + 8 * s);
            lanes.scramble(secret_ + SECRET_BYTES - STRIPE_BYTES);
        }
        const uint8_t *tail = data + chunks * CHUNK_BYTES;
        size_t stripes = (size - 1 - chunks * CHUNK_BYTES) / STRIPE_BYTES;
        for (size_t s = 0; s < stripes; s++) lanes.stripe(tail + s * STRIPE_BYTES, secret_ + 8 * s);
        lanes.stripe(data + size - STRIPE_BYTES, secret_ + SECRET_BYTES - STRIPE_BYTES - 7);
        return lanes.merge(secret_ + 11, size * PRIME64_1);
    }

    uint64_t seed_;
    alignas(64) uint8_t secret_[SECRET_BYTES];
};

// The functions that Cython calls, with one Hasher per call.

inline uint64_t hash(const void *data, size_t size, uint64_t seed) {
    return Hasher(seed)(data, size);
}

inline void hash_windows(const uint8_t *data, size_t count, size_t size, size_t stride,
                         uint64_t seed, uint64_t *out) {
    Hasher(seed).windows(data, count, size, stride, out);
}

inline void hash_chain(const uint8_t *words, size_t count, uint64_t seed, uint64_t *out) {
    Hasher(seed).chain(words, count, out);
}

}  // namespace dynamo::xxh3
