/* Attention over keys and values in blocks, float32, one job for some queries of one sequence, for each head of its keys.
 *
 * A block's keys lie dimension by dimension and its values token by token (see kv_cache.py), so that both the scores of a block and its
 * part of the output are products of a few rows with a panel of weights that is read where it lies. The keys are taken SEEN at a time and
 * the softmax is kept up to date (Milakov and Gimelshein, arXiv 1805.02867; FlashAttention, arXiv 2205.14135): however long a context is,
 * a job needs room for the scores of SEEN keys.
 */

#include "tile.h"

#define SEEN 512

typedef int integers __attribute__((vector_size(4 * WIDTH), aligned(4)));

/* e^x for x ≤ 0; exactly 0 below -87, NaN for NaN. The reduction and polynomial of Cephes' expf: e^x = 2^n · e^r. */
static vector exponential(vector x)
{
	const float shift = 12582912; /* 1.5 · 2^23: adding it rounds to an integer */
	vector n = (x * 1.44269504f + shift) - shift;
	vector r = x - n * 0.693359375f + n * 2.12194440e-4f;
	vector p = r * 1.9875691500e-4f + 1.3981999507e-3f;
	p = p * r + 8.3334519073e-3f;
	p = p * r + 4.1665795894e-2f;
	p = p * r + 1.6666665459e-1f;
	p = p * r + 5.0000001201e-1f;
	p = p * r * r + r + 1.0f;
	integers power = (__builtin_convertvector(n, integers) + 127) << 23;
	return (vector)((integers)(p * (vector)power) & ~(x < -87.0f));
}

typedef struct {
	long kv_heads, groups, head_dim, block_size;
	long block_step;  /* floats from one block to the next */
	long table_width; /* entries of a row of the table */
	long q_step, k_step, v_step; /* floats from one token to the next */
	long window;      /* keys that a query sees, 0 for all before it and itself */
	float scale;
} shape_t;

typedef struct {
	long token, count; /* queries [token, token + count) of the batch, */
	long position;     /* of which the first stands here in its sequence, */
	long row;          /* whose blocks this row of the table has */
} job_t;

static vector larger(vector a, vector b)
{
	integers first = a > b;
	return (vector)((first & (integers)a) | (~first & (integers)b));
}

/* Turns one query's scores of `keys` keys into weights, 0 but for those in [first, last). A new greatest score scales down what was summed
 * up before: `sum` and `out` (D). */
static void soften(float *scores, long keys, long first, long last, float *greatest, float *sum, float *out, long head_dim)
{
	const float nothing = -__builtin_inff();
	for (long key = 0; key < least(first, keys); key++)
		scores[key] = nothing;
	for (long key = most(last, 0); key < keys; key++)
		scores[key] = nothing;
	vector high = *(vector *)scores, total = {0};
	for (long key = WIDTH; key < keys; key += WIDTH)
		high = larger(high, *(vector *)(scores + key));
	float before = *greatest, now = before;
	for (long lane = 0; lane < WIDTH; lane++)
		now = high[lane] > now ? high[lane] : now;
	if (now == nothing) {
		__builtin_memset(scores, 0, keys * sizeof *scores);
		return;
	}
	for (long key = 0; key < keys; key += WIDTH) {
		vector weights = exponential(*(vector *)(scores + key) - now);
		*(vector *)(scores + key) = weights;
		total += weights;
	}
	if (now > before) {
		*greatest = now;
		float less = exponential((vector){0} + (before - now))[0];
		*sum *= less;
		for (long d = 0; d < head_dim; d += WIDTH)
			*(vector *)(out + d) *= less;
	}
	for (long lane = 0; lane < WIDTH; lane++)
		*sum += total[lane];
}

/* `rows` rows of x with a piece (depth, width) of the cache, onto what is in y or, if `fresh`, instead of it. `next`: the piece after it. */
static void multiply(const float *x, long x_step, long rows, const float *piece, long depth, long width, int fresh, float *y, long y_step,
	const float *next)
{
	static const float zeros[PANEL];
	long count = parts(rows, ROWS), lines = parts(depth * width / LINE, count * (width / PANEL)), fetched = 0;
	for (long column = 0; column < width; column += PANEL)
		for (long i = 0, row = 0; i < count; i++) {
			long many = rows / count + (i < rows % count);
			float *to = y + row * y_step + column;
			tiles[many](x + row * x_step, x_step, piece + column, width, depth, fresh ? zeros : to, fresh ? 0 : y_step, to, y_step,
				next + fetched, lines);
			fetched += lines * LINE;
			row += many;
		}
}

/* The queries of one job that share head `head` of the keys. */
static void attend_one(const shape_t *shape, const float *q, const float *cache, const int *table, job_t job, long head, float *out)
{
	long groups = shape->groups, dim = shape->head_dim, size = shape->block_size, rows = job.count * groups;
	long heads = shape->kv_heads, piece = size * dim, end = job.position + job.count;
	long begin = shape->window ? most(job.position - shape->window + 1, 0) / size : 0, blocks = parts(end, size);
	long together = most(SEEN / size, 1), step = together * size;
	float queries[rows * dim], sums[rows * dim], scores[rows * step], greatest[rows], total[rows];

	const int *numbers = table + job.row * shape->table_width;
	for (long row = 0; row < rows; row++) {
		const float *from = q + (job.token + row / groups) * shape->q_step + (head * groups + row % groups) * dim;
		for (long d = 0; d < dim; d++)
			queries[row * dim + d] = from[d] * shape->scale, sums[row * dim + d] = 0;
		greatest[row] = -__builtin_inff(), total[row] = 0;
	}
	for (long first = begin; first < blocks; first += together) {
		long last = least(first + together, blocks), keys = (last - first) * size;
#define KEYS(block) (cache + numbers[least(block, blocks - 1)] * shape->block_step + head * piece)
#define VALUES(block) (KEYS(block) + heads * piece)
		for (long block = first; block < last; block++)
			multiply(queries, dim, rows, KEYS(block), dim, size, 1, scores + (block - first) * size, step,
				block + 1 < last ? KEYS(block + 1) : VALUES(first));
		for (long row = 0; row < rows; row++) {
			long position = job.position + row / groups, oldest = shape->window ? most(position - shape->window + 1, 0) : 0;
			soften(scores + row * step, keys, oldest - first * size, position + 1 - first * size, greatest + row, total + row,
				sums + row * dim, dim);
		}
		for (long block = first; block < last; block++)
			multiply(scores + (block - first) * size, step, rows, VALUES(block), least(size, end - block * size), dim, 0, sums, dim,
				block + 1 < last ? VALUES(block + 1) : KEYS(last));
	}
	for (long row = 0; row < rows; row++) {
		float *to = out + ((job.token + row / groups) * heads * groups + head * groups + row % groups) * dim;
		for (long d = 0; d < dim; d++)
			to[d] = sums[row * dim + d] / total[row];
	}
}

/* The keys and values of a job's tokens, to where they belong. */
static void store(const shape_t *shape, const float *k, const float *v, float *cache, const int *table, job_t job)
{
	long dim = shape->head_dim, size = shape->block_size, piece = size * dim;
	for (long i = 0; i < job.count; i++) {
		long position = job.position + i, token = job.token + i;
		float *block = cache + table[job.row * shape->table_width + position / size] * shape->block_step;
		for (long head = 0; head < shape->kv_heads; head++) {
			float *keys = block + head * piece + position % size;
			for (long d = 0; d < dim; d++)
				keys[d * size] = k[token * shape->k_step + head * dim + d];
			float *values = block + (shape->kv_heads + head) * piece + position % size * dim;
			__builtin_memcpy(values, v + token * shape->v_step + head * dim, dim * sizeof *values);
		}
	}
}

/* q (tokens, kv_heads · groups, D), new k and v (tokens, kv_heads, D), the cache from the first key of a layer on → k and v are in the cache,
 * and out (tokens, kv_heads · groups, D). */
void attend(const shape_t *shape, const float *q, const float *k, const float *v, float *cache, const int *table, const job_t *jobs,
	long count, float *out, long threads)
{
#pragma omp parallel for num_threads(threads) if (threads > 1)
	for (long i = 0; i < count; i++)
		store(shape, k, v, cache, table, jobs[i]);
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (threads > 1)
	for (long i = 0; i < count * shape->kv_heads; i++)
		attend_one(shape, q, cache, table, jobs[i / shape->kv_heads], i % shape->kv_heads, out);
}
