// cblas_sgemm for a few rows times a matrix that lies row by row of what is multiplied: what a decode step is made of.
//
// OpenBLAS copies ("packs") the matrix before it multiplies, which pays when many rows use the copy. A decode step has one row
// for each reply, and reading the weights once is most of its work. Here each weight is read once, in the order in which
// it lies in memory, and used for all rows from a register. Everything else goes on to the next library's cblas_sgemm.
//
// Each element is added up in an order that depends on nothing but the length of its sum: a row's result is the same, to the
// bit, whatever rows are multiplied with it here and by however many threads.

#include <dlfcn.h>
#include <immintrin.h>
#include <omp.h>

#include <cmath>

namespace {

// A block's sums, the vectors of its columns and one of its rows are to fit the registers: 32 with AVX-512, which doubles
// their number for vectors of this length too (longer ones were no faster on the EPYC this was measured on), or 16.
// Up to MOST_ROWS it takes less time than OpenBLAS.
constexpr int LANES = 8, ROWS = 4;
#if defined(__AVX512VL__)
constexpr int COLUMNS = 6, MOST_ROWS = 32;
#elif defined(__FMA__)
constexpr int COLUMNS = 3, MOST_ROWS = 16;
#else
#error "not measured on such a CPU"
#endif

// Multiplications that are worth waking another thread for.
constexpr long WORTH_A_THREAD = 100000;

constexpr int ROW_MAJOR = 101, PLAIN = 111, TRANSPOSED = 112;

typedef void Sgemm(int, int, int, int, int, int, float, const float *, int, const float *, int, float, float *, int);

// C = A B^T, or C + A B^T: A (rows, k) and B (columns, k), each row `lda`, `ldb` floats after the one before.
struct Matrices {
    const float *a, *b;
    float *c;
    long lda, ldb, ldc;
    int rows, k;
    bool added;
};

inline float sum(__m256 vector) {
    float parts[LANES];
    _mm256_storeu_ps(parts, vector);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int lane = 0; lane < half; lane++) parts[lane] += parts[lane + half];
    return parts[0];
}

// fetch: the columns after these are wanted next.
template <int R, int C>
inline void block(const Matrices &of, int row, int column, bool fetch) {
    const float *a = of.a + row * of.lda, *b = of.b + column * of.ldb;
    __m256 sums[R][C] = {};
    int at = 0;
    for (; at + LANES <= of.k; at += LANES) {
        __m256 weights[C];
        for (int c = 0; c < C; c++) {
            weights[c] = _mm256_loadu_ps(b + c * of.ldb + at);
            if (fetch) __builtin_prefetch(b + (c + C) * of.ldb + at);
        }
        for (int r = 0; r < R; r++) {
            __m256 inputs = _mm256_loadu_ps(a + r * of.lda + at);
            // By name: whether the compiler joins a product and a sum by itself differs from block to block.
            for (int c = 0; c < C; c++) sums[r][c] = _mm256_fmadd_ps(inputs, weights[c], sums[r][c]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) {
            float total = sum(sums[r][c]);
            for (int left = at; left < of.k; left++)
                total = std::fmaf(a[r * of.lda + left], b[c * of.ldb + left], total);
            float *result = of.c + (row + r) * of.ldc + column + c;
            *result = of.added ? *result + total : total;
        }
}

template <int C>
inline void columns(const Matrices &of, int column, bool fetch) {
    int row = 0;
    for (; row + ROWS <= of.rows; row += ROWS, fetch = false)
        block<ROWS, C>(of, row, column, fetch);
    switch (of.rows - row) {
        case 3: return block<3, C>(of, row, column, fetch);
        case 2: return block<2, C>(of, row, column, fetch);
        case 1: return block<1, C>(of, row, column, fetch);
    }
}

void part(const Matrices &of, int from, int to) {
    int column = from;
    for (; column + COLUMNS <= to; column += COLUMNS) columns<COLUMNS>(of, column, column + 2 * COLUMNS <= to);
    for (; column < to; column++) columns<1>(of, column, false);
}

}  // namespace

extern "C" void cblas_sgemm(int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float *a, int lda,
                            const float *b, int ldb, float beta, float *c, int ldc) {
    static Sgemm *const next = reinterpret_cast<Sgemm *>(dlsym(RTLD_NEXT, "cblas_sgemm"));
    // A layer's bias is what its product is added to.
    bool known = alpha == 1 && (beta == 0 || beta == 1);
    if (!known || order != ROW_MAJOR || trans_a != PLAIN || trans_b != TRANSPOSED || m > MOST_ROWS)
        return next(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
    const Matrices of = {a, b, c, lda, ldb, ldc, m, k, beta == 1};
    if (static_cast<long>(n) * k * m < 2 * WORTH_A_THREAD || omp_get_max_threads() == 1) return part(of, 0, n);
#pragma omp parallel
    {
        long one = omp_get_thread_num(), all = omp_get_num_threads();
        part(of, static_cast<int>(n * one / all), static_cast<int>(n * (one + 1) / all));
    }
}
