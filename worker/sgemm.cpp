// cblas_sgemm for what a model's products are here: rows times a matrix that is transposed, so that each of its columns lies in
// one piece (the weights; the keys), and a few rows times a narrow one that is not (the values).
//
// OpenBLAS copies ("packs") the matrix before it multiplies, which pays when very many rows use the copy. Here a matrix is read as
// it lies, once for all rows of a decode step, from memory that was asked for it in time, and it is the rows that are copied.
// Everything else goes on to the next library's cblas_sgemm.
//
// Each element is added up in an order that depends on nothing but which of the two it is and the length of its sum: a row's
// result is the same, to the bit, whatever rows are multiplied with it here and by however many threads.

#include <dlfcn.h>
#include <immintrin.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>

namespace {

// COLUMNS of weights by ROWS: a block's sums, the vectors of its columns and one of its rows are to fit the registers. STRIP:
// so many vectors of columns that are not transposed. Up to MOST_ROWS, and MOST_PLAIN_ROWS of the second kind, it takes less
// time than OpenBLAS (measured on an EPYC of family 26: docs/benchmarks.md).
constexpr int ROWS = 4;
#if defined(__AVX512F__) && defined(__AVX512DQ__)
constexpr int LANES = 16, COLUMNS = 6, STRIP = 4, MOST_ROWS = INT32_MAX, MOST_PLAIN_ROWS = 32;
typedef __m512 Vector;
inline Vector load(const float *from) { return _mm512_loadu_ps(from); }
inline Vector load(const float *from, int lanes) { return _mm512_maskz_loadu_ps((1 << lanes) - 1, from); }
inline void store(float *to, Vector vector, int lanes) { _mm512_mask_storeu_ps(to, (1 << lanes) - 1, vector); }
inline Vector all(float number) { return _mm512_set1_ps(number); }
inline Vector add(Vector one, Vector other) { return _mm512_add_ps(one, other); }
// By name, here and below: whether the compiler joins a product and a sum by itself differs from block to block.
inline Vector multiply_add(Vector one, Vector other, Vector sum) { return _mm512_fmadd_ps(one, other, sum); }
inline __m256 halved(Vector vector) { return _mm256_add_ps(_mm512_castps512_ps256(vector), _mm512_extractf32x8_ps(vector, 1)); }
#elif defined(__FMA__) && defined(__AVX2__)
constexpr int LANES = 8, COLUMNS = 3, STRIP = 2, MOST_ROWS = 16, MOST_PLAIN_ROWS = 16;
typedef __m256 Vector;
inline __m256i first(int lanes) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(lanes), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline Vector load(const float *from) { return _mm256_loadu_ps(from); }
inline Vector load(const float *from, int lanes) { return _mm256_maskload_ps(from, first(lanes)); }
inline void store(float *to, Vector vector, int lanes) { _mm256_maskstore_ps(to, first(lanes), vector); }
inline Vector all(float number) { return _mm256_set1_ps(number); }
inline Vector add(Vector one, Vector other) { return _mm256_add_ps(one, other); }
inline Vector multiply_add(Vector one, Vector other, Vector sum) { return _mm256_fmadd_ps(one, other, sum); }
inline __m256 halved(Vector vector) { return vector; }
#else
#error "not measured on such a CPU"
#endif

// What stays in the nearest cache of so many columns as a block has; and in the second of rows, of which a pass over all columns
// takes LEAST_PASS at least.
constexpr long PIECE_BYTES = 20 << 10, PASS_BYTES = 512 << 10, LEAST_PASS = 32;

// Multiplications that are worth waking another thread for, and columns that are worth copying the rows for.
constexpr long WORTH_A_THREAD = 100000, WORTH_COPYING = 96;

// Of columns that are not transposed: those of a head. Wider matrices are read in strips, which the memory does not like.
constexpr int MOST_PLAIN_COLUMNS = 512;

constexpr int ROW_MAJOR = 101, PLAIN = 111, TRANSPOSED = 112;

typedef void Sgemm(int, int, int, int, int, int, float, const float *, int, const float *, int, float, float *, int);

// C = A B, or C + A B; each row of A and C, and what lies together in B (a row, or a column of one that is transposed), begins
// `lda`, `ldb` and `ldc` floats after the one before.
struct Matrices {
    const float *a, *b;
    float *c;
    long lda, ldb, ldc;
    int rows, k;
    bool added;
};

// The sums of four vectors, each by itself and in the same order.
inline __m128 sums(Vector a, Vector b, Vector c, Vector d) {
    __m256 ab = _mm256_hadd_ps(halved(a), halved(b)), cd = _mm256_hadd_ps(halved(c), halved(d));
    __m256 quarters = _mm256_hadd_ps(ab, cd);
    return _mm_add_ps(_mm256_castps256_ps128(quarters), _mm256_extractf128_ps(quarters, 1));
}

// next: as many columns that are wanted soon, of which to fetch meanwhile those between `from` and `to`.
template <int R, int C>
inline __attribute__((always_inline)) void block(const Matrices &of, int row, int column, const float *next, int from, int to) {
    const float *a = of.a + row * of.lda, *b = of.b + column * of.ldb;
    Vector found[R][C] = {};
    int at = 0;
    auto step = [&](auto... lanes) __attribute__((always_inline)) {
        Vector weights[C];
        for (int c = 0; c < C; c++) weights[c] = load(b + c * of.ldb + at, lanes...);
        for (int c = from; c < to; c++) __builtin_prefetch(next + c * of.ldb + at);
        for (int r = 0; r < R; r++) {
            Vector inputs = load(a + r * of.lda + at, lanes...);
            for (int c = 0; c < C; c++) found[r][c] = multiply_add(inputs, weights[c], found[r][c]);
        }
    };
    for (; at + LANES <= of.k; at += LANES) step();
    if (at < of.k) step(of.k - at);
    constexpr int COUNT = R * C;
    const Vector *all = &found[0][0];
#pragma GCC unroll 32
    for (int i = 0; i < COUNT; i += 4) {
        auto one = [=](int j) __attribute__((always_inline)) { return all[i + j < COUNT ? i + j : i]; };
        float four[4];
        _mm_storeu_ps(four, sums(one(0), one(1), one(2), one(3)));
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            if (i + j >= COUNT) continue;
            float *result = of.c + (row + (i + j) / C) * of.ldc + column + (i + j) % C;
            *result = of.added ? *result + four[j] : four[j];
        }
    }
}

// The last rows, a block's at most, from `row` on.
template <int C>
inline __attribute__((always_inline)) void last_rows(const Matrices &of, int row, int column, const float *next, int from, int to) {
    switch (of.rows - row) {
        case 4: return block<4, C>(of, row, column, next, from, to);
        case 3: return block<3, C>(of, row, column, next, from, to);
        case 2: return block<2, C>(of, row, column, next, from, to);
        case 1: return block<1, C>(of, row, column, next, from, to);
    }
}

// All rows by C columns. next: see block(); or nullptr.
template <int C>
inline void columns(const Matrices &of, int column, const float *next) {
    const int to = next ? C : 0;
    // Apart, with a number that the compiler knows: one block is much of what a decode step of few rows is.
    if (of.rows <= ROWS) return last_rows<C>(of, 0, column, next, 0, to);
    // Each pass over the columns fetches a part of the next, so that the memory is never idle.
    const int passes = (of.rows + ROWS - 1) / ROWS;
    int row = 0, from = 0;
    for (int pass = 1; row + ROWS <= of.rows; row += ROWS, pass++) {
        const int until = to * pass / passes;
        block<ROWS, C>(of, row, column, next, from, until);
        from = until;
    }
    last_rows<C>(of, row, column, next, from, to);
}

// Long columns in pieces that stay in the nearest cache from one pass to the next, with those of the rows that go with them.
// after: the columns that follow, or nullptr.
template <int C>
inline void by_pieces(const Matrices &of, int column, const float *after) {
    constexpr long MOST = PIECE_BYTES / static_cast<long>(sizeof(float)) / COLUMNS;
    const long pieces = (of.k + MOST - 1) / MOST, length = ((of.k + pieces - 1) / pieces + LANES - 1) / LANES * LANES;
    for (long at = 0; at < of.k; at += length) {
        const bool last = at + length >= of.k;
        Matrices piece = of;
        piece.a += at;
        piece.b += at;
        piece.k = static_cast<int>(last ? of.k - at : length);
        piece.added = of.added || at > 0;
        columns<C>(piece, column, last ? after : piece.b + column * of.ldb + length);
    }
}

void transposed(const Matrices &of, int from, int to) {
    int column = from;
    for (; column + COLUMNS <= to; column += COLUMNS)
        by_pieces<COLUMNS>(of, column, column + 2 * COLUMNS <= to ? of.b + (column + COLUMNS) * of.ldb : nullptr);
    for (; column < to; column++) by_pieces<1>(of, column, nullptr);
}

// last: how many lanes of the last vector are columns.
template <int R, int V>
inline __attribute__((always_inline)) void plain_block(const Matrices &of, int row, int column, int last) {
    const float *a = of.a + row * of.lda, *b = of.b + column;
    Vector found[R][V] = {};
    for (int at = 0; at < of.k; at++, b += of.ldb)
        for (int v = 0; v < V; v++) {
            Vector values = v < V - 1 ? load(b + v * LANES) : load(b + v * LANES, last);
            for (int r = 0; r < R; r++) found[r][v] = multiply_add(all(a[r * of.lda + at]), values, found[r][v]);
        }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) {
            float *result = of.c + (row + r) * of.ldc + column + v * LANES;
            int lanes = v < V - 1 ? LANES : last;
            store(result, of.added ? add(load(result, lanes), found[r][v]) : found[r][v], lanes);
        }
}

template <int V>
inline void strip(const Matrices &of, int column, int last) {
    int row = 0;
    for (; row + ROWS <= of.rows; row += ROWS) plain_block<ROWS, V>(of, row, column, last);
    switch (of.rows - row) {
        case 3: return plain_block<3, V>(of, row, column, last);
        case 2: return plain_block<2, V>(of, row, column, last);
        case 1: return plain_block<1, V>(of, row, column, last);
    }
}

void plain(const Matrices &of, int from, int to) {
    int column = from;
    for (; column + STRIP * LANES <= to; column += STRIP * LANES) strip<STRIP>(of, column, LANES);
    for (; column < to; column += LANES) strip<1>(of, column, std::min(to - column, LANES));
}

// Memory of a thread, for its rows.
struct Scratch {
    float *data = nullptr;
    long size = 0;
    ~Scratch() { std::free(data); }

    // nullptr: there is not so much.
    float *of(long floats) {
        if (floats > size) {
            std::free(data);
            data = static_cast<float *>(std::aligned_alloc(64, (floats * sizeof(float) + 63) / 64 * 64));
            size = data ? floats : 0;
        }
        return data;
    }
};

typedef void Part(const Matrices &, int, int);

// A part of the columns, in passes of so many rows as stay in the cache next to the weights.
void by_passes(Part *part, const Matrices &of, int from, int to) {
    static thread_local Scratch scratch;
    const long whole = (of.k + LANES - 1L) / LANES * LANES;
    // Rows that lie a multiple of a page apart fall on the same lines of the nearest cache.
    const long stride = whole * sizeof(float) % 4096 ? whole : whole + LANES;
    const long most = std::max(PASS_BYTES / static_cast<long>(sizeof(float)) / whole, LEAST_PASS);
    const long passes = (of.rows + most - 1) / most, rows = ((of.rows + passes - 1) / passes + ROWS - 1) / ROWS * ROWS;
    // A vector that begins anywhere lies in two lines of the cache. For few columns it costs more to copy the rows.
    float *const copied = to - from < WORTH_COPYING ? nullptr : scratch.of(std::min<long>(rows, of.rows) * stride);
    for (long row = 0; row < of.rows; row += rows) {
        Matrices some = of;
        some.rows = static_cast<int>(std::min(rows, of.rows - row));
        some.a += row * of.lda;
        some.c += row * of.ldc;
        if (copied) {
            for (int r = 0; r < some.rows; r++) std::memcpy(copied + r * stride, some.a + r * of.lda, of.k * sizeof(float));
            some.a = copied;
            some.lda = stride;
        }
        part(some, from, to);
    }
}

// One product, its columns in stretches: the first ones long, the last ones short, so that all threads end together.
struct Job {
    static constexpr int MOST = 512;
    Part *part;
    Matrices of;
    // Read by helpers that do not know yet whether it is this job's.
    std::atomic<int> stretches;
    int ends[MOST];

    void prepare(Part *how, const Matrices &what, int columns, int unit, int threads) {
        part = how;
        of = what;
        int count = 0, parts = std::min(8 * threads, MOST - 1), least = (columns + parts - 1) / parts;
        for (int at = 0; at < columns; ends[count++] = at) {
            // A stretch begins with columns that nobody has fetched, so there should be few.
            int share = std::max(static_cast<int>(2L * (columns - at) / (3 * threads)), least);
            at = std::min(columns, at + (share + unit - 1) / unit * unit);
        }
        stretches.store(count, std::memory_order_relaxed);
    }

    void carry_out(int stretch) const { by_passes(part, of, stretch ? ends[stretch - 1] : 0, ends[stretch]); }
};

// Threads that help with what one thread at a time gives them. Whoever is there takes the next stretch: a helper whose core
// another thread has got is not waited for unless it has begun one, as OpenMP would.
class Helpers {
  public:
    // All but the calling one. As many as OpenBLAS is told, whose part of the work this is.
    static int count() {
        static const int wanted = [] {
            const char *said = std::getenv("OPENBLAS_NUM_THREADS");
            int cores = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN)), threads = said ? std::atoi(said) : cores;
            return (threads > 0 ? threads : cores) - 1;
        }();
        return wanted;
    }

    // The product of all columns, in whole blocks of `unit`, for so many threads. false: not done, they are another thread's
    // just now.
    bool carry_out(Part *part, const Matrices &of, int columns, int unit, int threads) {
        std::unique_lock<std::mutex> ours(one_at_a_time_, std::try_to_lock);
        if (!ours) return false;
        start();
        const uint64_t number = (next_.load(std::memory_order_relaxed) >> 32) + 1;
        Job &job = jobs_[number % RING];
        job.prepare(part, of, columns, unit, threads);
        done_.store(0, std::memory_order_relaxed);
        next_.store(number << 32);
        calls_.fetch_add(1);
        if (asleep_.load() > 0) syscall(SYS_futex, &calls_, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
        work();
        for (int turns = 0; done_.load(std::memory_order_acquire) < job.stretches.load(std::memory_order_relaxed); turns++)
            turns % 256 == 255 ? (void)sched_yield() : _mm_pause();
        return true;
    }

  private:
    // So many jobs are kept, so that a helper that comes late seldom reads of another than it thinks. If it does, it takes
    // nothing: next_ says by then that its job is over.
    static constexpr int RING = 64;
    // How often to look for the next product before sleeping: for a tenth of a millisecond or two.
    static constexpr int TURNS = 4000;

    std::mutex one_at_a_time_;
    Job jobs_[RING];
    // The job's number and, in the lower half, the next stretch of it: taken together, so nothing is taken of a job that is over.
    alignas(64) std::atomic<uint64_t> next_{0};
    alignas(64) std::atomic<int> done_{0};
    alignas(64) std::atomic<int> asleep_{0};
    std::atomic<uint32_t> calls_{0};
    pid_t started_in_ = 0;

    // A fork takes none of them along.
    void start() {
        if (started_in_ == getpid()) return;
        started_in_ = getpid();
        asleep_ = 0;
        for (int i = 0; i < count(); i++) {
            pthread_t thread;
            if (pthread_create(&thread, nullptr, [](void *self) -> void * { static_cast<Helpers *>(self)->help(); }, this))
                break;
            pthread_detach(thread);
        }
    }

    // Whether there was anything.
    bool work() {
        bool any = false;
        for (uint64_t next = next_.load(std::memory_order_acquire);;) {
            const Job &job = jobs_[(next >> 32) % RING];
            const int stretch = static_cast<int>(next & UINT32_MAX);
            if (stretch >= job.stretches.load(std::memory_order_relaxed)) return any;
            if (!next_.compare_exchange_weak(next, next + 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
            job.carry_out(stretch);
            done_.fetch_add(1, std::memory_order_release);
            any = true;
            next = next_.load(std::memory_order_acquire);
        }
    }

    [[noreturn]] void help() {
        for (;;) {
            const uint32_t seen = calls_.load();
            int turns = 0;
            while (!work() && calls_.load() == seen && turns < TURNS) {
                // Who has something to compute on this core comes first.
                ++turns % 64 ? _mm_pause() : (void)sched_yield();
            }
            if (turns < TURNS) continue;
            asleep_.fetch_add(1);
            syscall(SYS_futex, &calls_, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
            asleep_.fetch_sub(1);
        }
    }
};

Helpers helpers;

}  // namespace

extern "C" void cblas_sgemm(int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float *a, int lda,
                            const float *b, int ldb, float beta, float *c, int ldc) {
    static Sgemm *const next = reinterpret_cast<Sgemm *>(dlsym(RTLD_NEXT, "cblas_sgemm"));
    // A layer's bias is what its product is added to.
    bool known = m > 0 && n > 0 && k > 0 && alpha == 1 && (beta == 0 || beta == 1) && order == ROW_MAJOR && trans_a == PLAIN &&
                 ((trans_b == TRANSPOSED && m <= MOST_ROWS) ||
                  (trans_b == PLAIN && m <= MOST_PLAIN_ROWS && n <= MOST_PLAIN_COLUMNS));
    if (!known) return next(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
    const Matrices of = {a, b, c, lda, ldb, ldc, m, k, beta == 1};
    auto *const part = trans_b == TRANSPOSED ? transposed : plain;
    const int unit = trans_b == TRANSPOSED ? COLUMNS : STRIP * LANES;
    const long worth = static_cast<long>(n) * k * m / WORTH_A_THREAD;
    const int threads = static_cast<int>(std::min<long>(worth, Helpers::count() + 1));
    if (threads < 2 || !helpers.carry_out(part, of, n, unit, threads)) by_passes(part, of, 0, n);
}
