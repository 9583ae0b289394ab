// How many blocks of a lower storage tier follow the device's blocks. Included by radix.hpp.
#pragma once

namespace dynamo::radix {

inline size_t Index::extend(const uint8_t *tokens_hashes, size_t count, const uint32_t *depths,
                            uint32_t *extensions, uint32_t tier) {
    const auto &slots = held_[tier];
    joiners_.clear();
    for (uint32_t number = 0; number < slots.size(); number++)
        if (slots[number].size() != 0 && depths[number] < count)
            joiners_.push_back(Joiner{depths[number], number});
    if (joiners_.empty()) return 0;
    std::sort(joiners_.begin(), joiners_.end(),
              [](const Joiner &one, const Joiner &other) { return one.depth < other.depth; });
    joined_.assign(slots.size() / SLOTS_PER_WORD + 1, 0);

    const uint32_t first_group = tier * FIRST_LOWER_GROUP;
    size_t extended = 0, active = 0, next = 0;
    uint32_t node = ROOT, depth = 0;
    // The slots of `mask` hold no block at `depth`.
    auto end_here = [&](size_t group, uint64_t mask) {
        for (joined_[group] &= ~mask; mask != 0; mask &= mask - 1, active--) {
            size_t number = group * SLOTS_PER_WORD + static_cast<size_t>(__builtin_ctzll(mask));
            extensions[number] = depth - depths[number];
            extended += extensions[number] != 0;
        }
    };
    for (; depth < count && (active != 0 || next < joiners_.size()); depth++) {
        node = nodes_.find_child(node, load64(tokens_hashes, depth));
        if (node == NO_NODE) break;
        for (; next < joiners_.size() && joiners_[next].depth == depth; next++, active++) {
            uint32_t number = joiners_[next].number;
            joined_[number / SLOTS_PER_WORD] |= uint64_t{1} << number % SLOTS_PER_WORD;
        }
        if (active == 0) continue;
        Holders::Reader holders(holders_, nodes_[node]);
        for (size_t group = 0; group < joined_.size(); group++) {
            if (joined_[group] == 0) continue;
            uint64_t held = holders.mask(first_group + static_cast<uint32_t>(group));
            end_here(group, joined_[group] & ~held);
        }
    }
    for (size_t group = 0; group < joined_.size(); group++) end_here(group, joined_[group]);
    return extended;
}

inline void Index::ranges(const uint8_t *tokens_hashes, size_t count, uint32_t tier,
                          std::vector<uint32_t> *out) const {
    const uint32_t first_group = tier * FIRST_LOWER_GROUP;
    uint32_t node = ROOT, depth = 0;
    bool inside = false;
    for (; depth < count; depth++) {
        node = nodes_.find_child(node, load64(tokens_hashes, depth));
        if (node == NO_NODE) break;
        bool held = false;
        Holders::Reader(holders_, nodes_[node]).each([&](const Word &word) {
            held = held || (word.group >= first_group && word.group - first_group < FIRST_LOWER_GROUP);
        });
        if (held != inside) out->push_back(depth);
        inside = held;
    }
    if (inside) out->push_back(depth);
}

}  // namespace dynamo::radix
