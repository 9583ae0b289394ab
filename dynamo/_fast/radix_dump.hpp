// Writing the index down as chains whose replay gives the same matches. Included by radix.hpp.
#pragma once

namespace dynamo::radix {

// Works slot by slot. Only what hangs together from the root is written: a block behind a hole
// cannot be replayed (its parent has no name on that slot) and counts in no match either.
class Dumper {
public:
    Dumper(const Index &index, Dump *out)
        : index_(index), out_(*out), position_(index.nodes_.end(), NONE) {}

    void write_slot(uint32_t slot) {
        slot_ = slot;
        collect();
        link();
        for (uint32_t first = roots_; first != NONE; first = blocks_[first].sibling)
            pending_.push_back({first, NONE});
        while (!pending_.empty()) {
            auto [block, parent] = pending_.back();
            pending_.pop_back();
            write_run(block, parent);
        }
        for (const Block &block : blocks_) position_[block.node] = NONE;
    }

private:
    static constexpr uint32_t NONE = 0xFFFFFFFFu;

    struct Block {
        uint32_t node;
        uint64_t hash;
        uint32_t child = NONE;    // first block below it on this slot
        uint32_t sibling = NONE;  // next block below the same parent
        uint32_t alias = NONE;    // next block that names the same node
    };

    void collect() {
        blocks_.clear();
        roots_ = NONE;
        for (const auto &entry : index_.held_[slot_]) {
            if (entry.value == 0) continue;
            uint32_t here = static_cast<uint32_t>(blocks_.size());
            blocks_.push_back(Block{entry.value, index_.unmix(entry.key)});
            uint32_t first = position_[entry.value];
            if (first == NONE) {
                position_[entry.value] = here;
            } else {
                blocks_[here].alias = blocks_[first].alias;
                blocks_[first].alias = here;
            }
        }
    }

    void link() {
        for (uint32_t here = 0; here < blocks_.size(); here++) {
            Block &block = blocks_[here];
            if (position_[block.node] != here) continue;  // an alias hangs on the first name
            uint32_t parent = index_.nodes_[block.node].parent;
            uint32_t *list = parent == ROOT ? &roots_ : nullptr;
            if (parent != ROOT && position_[parent] != NONE)
                list = &blocks_[position_[parent]].child;
            if (list == nullptr) continue;
            block.sibling = *list;
            *list = here;
        }
    }

    // A block and, as long as there is one, its first child; the other children wait their turn.
    void write_run(uint32_t block, uint32_t parent) {
        Run run = begin_run(parent);
        for (uint32_t here = block; here != NONE; here = blocks_[here].child) {
            write(here);
            if (blocks_[here].alias != NONE) aliased_.push_back({here, parent});
            uint32_t child = blocks_[here].child;
            if (child != NONE)
                for (uint32_t more = blocks_[child].sibling; more != NONE;
                     more = blocks_[more].sibling)
                    pending_.push_back({more, here});
            parent = here;
        }
        end_run(run);
        for (auto [first, above] : aliased_) write_aliases(first, above);
        aliased_.clear();
    }

    void write_aliases(uint32_t first, uint32_t parent) {
        for (uint32_t at = blocks_[first].alias; at != NONE; at = blocks_[at].alias) {
            Run run = begin_run(parent);
            write(at);
            end_run(run);
        }
    }

    Run begin_run(uint32_t parent) const {
        uint64_t parent_hash = parent == NONE ? 0 : blocks_[parent].hash;
        size_t at = out_.block_hashes.size();
        return Run{slot_, parent != NONE, parent_hash, at, at};
    }

    void end_run(Run run) {
        run.end = out_.block_hashes.size();
        out_.runs.push_back(run);
    }

    void write(uint32_t block) {
        out_.block_hashes.push_back(blocks_[block].hash);
        out_.tokens_hashes.push_back(index_.nodes_[blocks_[block].node].tokens_hash);
    }

    struct Step {
        uint32_t block, parent;
    };

    const Index &index_;
    Dump &out_;
    std::vector<uint32_t> position_;  // node -> first of its blocks
    std::vector<Block> blocks_;
    std::vector<Step> pending_, aliased_;
    uint32_t roots_ = NONE;
    uint32_t slot_ = 0;
};

inline void Index::dump(Dump *out) const {
    Dumper dumper(*this, out);
    for (uint32_t slot = 0; slot < held_.size(); slot++) dumper.write_slot(slot);
}

}  // namespace dynamo::radix
