package nvmetest

// page is how much of an image is kept in one piece.
const page = 64 << 10

// image is the content of a disk; what was never written takes no memory. Clones share pages until one of them is written.
type image struct {
	size   int64
	pages  map[int64]*[page]byte
	shared map[int64]bool
}

func newImage(size int64) *image {
	return &image{size: size, pages: map[int64]*[page]byte{}, shared: map[int64]bool{}}
}

func (m *image) clone() *image {
	c := newImage(m.size)
	for k, p := range m.pages {
		c.pages[k], c.shared[k], m.shared[k] = p, true, true
	}
	return c
}

func (m *image) read(b []byte, off int64) {
	for len(b) > 0 {
		n := min(int64(len(b)), page-off%page)
		if p := m.pages[off/page]; p != nil {
			copy(b[:n], p[off%page:])
		} else {
			clear(b[:n])
		}
		b, off = b[n:], off+n
	}
}

func (m *image) write(b []byte, off int64) {
	for len(b) > 0 {
		k, n := off/page, min(int64(len(b)), page-off%page)
		p := m.pages[k]
		if p == nil || m.shared[k] {
			own := new([page]byte)
			if p != nil {
				*own = *p
			}
			p = own
			m.pages[k] = p
			delete(m.shared, k)
		}
		copy(p[off%page:], b[:n])
		b, off = b[n:], off+n
	}
}

func (m *image) resize(size int64) {
	if size < m.size {
		for k := range m.pages {
			if k*page >= size {
				delete(m.pages, k)
				delete(m.shared, k)
			}
		}
		if tail := size % page; tail != 0 {
			m.write(make([]byte, min(page-tail, m.size-size)), size)
		}
	}
	m.size = size
}
