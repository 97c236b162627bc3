package copyshim

// poly is Castagnoli's polynomial, reflected: bit 31 stands for x^0.
const poly = 0x82f63b78

// Combine is the CRC32C of two byte strings one after the other, from that of each and the length of the second. Parts of a copy that were made by
// different threads become one checksum by it.
//
// A CRC is a polynomial modulo P; appending n bytes multiplies what was before them by x^(8n).
func Combine(first, second uint32, secondLength uint64) uint32 {
	return multiply(first, powerOfX(8*secondLength)) ^ second
}

// multiply multiplies two polynomials modulo P.
func multiply(a, b uint32) uint32 {
	var product uint32
	for bit := uint32(1 << 31); bit != 0; bit >>= 1 {
		if a&bit != 0 {
			product ^= b
		}
		b = b>>1 ^ poly&-(b&1) // times x
	}
	return product
}

// squares has x^(2^k) modulo P.
var squares = func() (table [64]uint32) {
	table[0] = 1 << 30 // x^1
	for k := 1; k < len(table); k++ {
		table[k] = multiply(table[k-1], table[k-1])
	}
	return table
}()

// powerOfX is x^n modulo P.
func powerOfX(n uint64) uint32 {
	result := uint32(1 << 31) // x^0
	for k := 0; n != 0; k, n = k+1, n>>1 {
		if n&1 != 0 {
			result = multiply(result, squares[k])
		}
	}
	return result
}
