/* A few rows times a panel of weights, summed up in vector registers: what both products and attention are made of. */

#ifdef __AVX512F__
#define WIDTH 16
#else
#define WIDTH 8
#endif
#define PANEL (2 * WIDTH)
#define ROWS 6 /* ROWS · 2 sums, 2 weights and 1 input fill the 16 vector registers of AVX2 */
#define LINE 16 /* floats of a cache line */

typedef float vector __attribute__((vector_size(4 * WIDTH), aligned(4)));

static inline long least(long a, long b) { return a < b ? a : b; }
static inline long most(long a, long b) { return a > b ? a : b; }
static inline long parts(long whole, long part) { return (whole + part - 1) / part; }

#define EACH1(DO) DO(0)
#define EACH2(DO) EACH1(DO) DO(1)
#define EACH3(DO) EACH2(DO) DO(2)
#define EACH4(DO) EACH3(DO) DO(3)
#define EACH5(DO) EACH4(DO) DO(4)
#define EACH6(DO) EACH5(DO) DO(5)

/* Sums are named one by one: an array of them may end up in memory. */
#define START(r) \
	const float *x##r = x + (r) * x_step; \
	vector low##r = *(const vector *)(start + (r) * start_step), high##r = *(const vector *)(start + (r) * start_step + WIDTH);
#define ADD(r) low##r += x##r[k] * low, high##r += x##r[k] * high;
#define STORE(r) *(vector *)(y + (r) * y_step) = low##r, *(vector *)(y + (r) * y_step + WIDTH) = high##r;
#define STEP(rows) \
	{ \
		vector low = *(const vector *)weights, high = *(const vector *)(weights + WIDTH); \
		EACH##rows(ADD) weights += weights_step, k++; \
	}

/* y (rows, PANEL) = start (rows, PANEL) + x (rows, depth) · weights (depth, PANEL); a step is the distance of a row from the next, 0 where
 * all rows start alike. `next` are `lines` cache lines that will be needed soon: they are fetched on the way. */
#define TILE(rows) \
	static void tile##rows(const float *x, long x_step, const float *weights, long weights_step, long depth, const float *start, \
		long start_step, float *y, long y_step, const float *next, long lines) \
	{ \
		EACH##rows(START) long k = 0, pause = depth / lines; \
		for (long line = 0; line < lines; line++) { \
			__builtin_prefetch(next + line * LINE, 0, 2); \
			for (long end = k + pause; k < end;) \
				STEP(rows) \
		} \
		while (k < depth) \
			STEP(rows) \
		EACH##rows(STORE) \
	}
TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6)

typedef void tile(const float *, long, const float *, long, long, const float *, long, float *, long, const float *, long);
static tile *const tiles[ROWS + 1] = {0, tile1, tile2, tile3, tile4, tile5, tile6};
