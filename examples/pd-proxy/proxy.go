package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"time"
)

// config is what a proxy works with. Nothing of it is modified.
type config struct {
	Prefill, Decode []*engine
	Overlap         bool
	PrefillTimeout  time.Duration
	BodyMax         int64
	Log             *slog.Logger
}

// proxy serves clients. Safe for concurrent use.
type proxy struct {
	config
	prefills, decodes group
	hints             *hints
	client            *http.Client
	counts            counts
}

const (
	answerMax   = 64 << 20 // of a prefill engine, and of a decode engine's JSON or one of its events
	readTimeout = time.Minute
)

// clientGone is the status in the log of a request whose client did not wait; nobody gets it.
const clientGone = 499

func newProxy(c config) http.Handler {
	p := &proxy{config: c, hints: newHints(c.Decode), client: &http.Client{
		Transport: &http.Transport{
			DialContext:         (&net.Dialer{Timeout: 3 * time.Second}).DialContext,
			MaxIdleConnsPerHost: 64,
			IdleConnTimeout:     2 * time.Second, // before the engine closes it, just when it is used again
			DisableCompression:  true,
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}}
	p.prefills.engines, p.decodes.engines = c.Prefill, c.Decode
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/completions", func(w http.ResponseWriter, r *http.Request) { p.complete(w, r, false) })
	mux.HandleFunc("POST /v1/chat/completions", func(w http.ResponseWriter, r *http.Request) { p.complete(w, r, true) })
	mux.HandleFunc("GET /v1/models", p.models)
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { _, _ = fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /metrics", p.counts.serve)
	return mux
}

// request is one of a client, and what becomes of it, for the log. Its fields belong to one goroutine at a time.
type request struct {
	id, url string
	chat    bool
	header  http.Header // for engines
	body    object
	begin   time.Time

	way             way
	prefill, decode string // engines
	prefillTime     time.Duration
	firstTime       time.Duration // until the decode engine's answer began
	reason          string        // why the prefill leg came to nothing
	prefillFailed   bool
	status          int
	err             error
	cut             bool // the client has a part of the answer, and there is no more
}

func (p *proxy) complete(w http.ResponseWriter, r *http.Request, chat bool) {
	q := &request{id: r.Header.Get("X-Request-Id"), url: r.URL.Path, chat: chat, header: forEngines(r.Header), begin: time.Now(), way: handoff}
	if q.id == "" {
		q.id = rand.Text()
		q.header.Set("X-Request-Id", q.id)
	}
	w.Header().Set("X-Request-Id", q.id)
	p.answer(w, r, q)
	if r.Context().Err() != nil {
		q.status = clientGone
	}
	p.done(q)
	if q.cut {
		panic(http.ErrAbortHandler) // the client must not take what it has for the whole
	}
}

func (p *proxy) answer(w http.ResponseWriter, r *http.Request, q *request) {
	if status, err := p.read(w, r, q); err != nil {
		q.way = refused
		q.refuse(w, status, err)
	} else if p.Overlap {
		p.atOnce(r.Context(), w, q)
	} else {
		p.inTurn(r.Context(), w, q)
	}
}

// done counts and logs.
func (p *proxy) done(q *request) {
	p.counts.requests[q.way].Add(1)
	level := slog.LevelInfo
	attrs := []slog.Attr{
		slog.String("id", q.id), slog.String("url", q.url), slog.String("path", q.way.String()), slog.Int("status", q.status),
		slog.String("prefill", q.prefill), slog.String("decode", q.decode),
		slog.Int64("prefill_ms", q.prefillTime.Milliseconds()), slog.Int64("first_ms", q.firstTime.Milliseconds()), slog.Int64("total_ms", time.Since(q.begin).Milliseconds()),
	}
	if q.reason != "" {
		attrs = append(attrs, slog.String("reason", q.reason))
	}
	if q.prefillFailed {
		p.counts.prefillFailed.Add(1)
		level = slog.LevelWarn
	}
	if q.status == clientGone {
		p.counts.clientsGone.Add(1)
	} else if q.err != nil {
		level = slog.LevelWarn
		attrs = append(attrs, slog.Any("error", q.err))
	}
	if q.cut && q.status != clientGone {
		p.counts.answersCut.Add(1)
	}
	p.Log.LogAttrs(context.Background(), level, "request", attrs...)
}

// read takes the client's body. Parameters are not the client's to choose: they name other people's KV.
func (p *proxy) read(w http.ResponseWriter, r *http.Request, q *request) (int, error) {
	c := http.NewResponseController(w)
	_ = c.SetReadDeadline(time.Now().Add(readTimeout))
	b, err := io.ReadAll(http.MaxBytesReader(w, r.Body, p.BodyMax))
	_ = c.SetReadDeadline(time.Time{})
	var large *http.MaxBytesError
	if errors.As(err, &large) {
		return http.StatusRequestEntityTooLarge, fmt.Errorf("body: more than %d bytes", large.Limit)
	}
	if err != nil {
		return http.StatusBadRequest, fmt.Errorf("body: %w", err)
	}
	if q.body, err = parseObject(b); err != nil {
		return http.StatusBadRequest, fmt.Errorf("body: %w", err)
	}
	delete(q.body, paramsKey)
	return 0, nil
}

// inTurn: first the prompt, then the rest.
func (p *proxy) inTurn(ctx context.Context, w http.ResponseWriter, q *request) {
	body := prefillBody(q.body, q.chat, nil, p.hints.first())
	var ticket object
	var err error
	for _, e := range p.prefills.order(time.Now()) {
		var refused bool
		if ticket, refused, err = p.prefillLeg(ctx, e, q, body); !refused {
			break
		}
	}
	switch {
	case ctx.Err() != nil:
		return
	case err != nil:
		q.way, q.reason, q.prefillFailed = decodeOnly, err.Error(), true
	case ticket == nil:
		q.way, q.reason = decodeOnly, "the prefill engine gave no parameters"
	}
	p.decodeLeg(ctx, w, q, decodeBody(q.body, ticket))
}

// errPrefillFailed ends a decode leg that waits for a prompt that will not come.
var errPrefillFailed = errors.New("the prefill leg failed")

// atOnce: both legs know the transfer's id. When the prefill leg fails before anything was sent to the client, the decode engine is asked again, to compute.
func (p *proxy) atOnce(ctx context.Context, w http.ResponseWriter, q *request) {
	q.way = overlap
	t := newTransfer()
	e := p.prefills.order(time.Now())[0]
	body := prefillBody(q.body, q.chat, &t, p.hints.first())
	legCtx, cancel := context.WithCancel(ctx)
	waiting, giveUp := context.WithCancelCause(ctx)
	defer giveUp(nil)
	done := make(chan error, 1)
	leg := &request{url: q.url, header: q.header}
	go func() {
		_, _, err := p.prefillLeg(legCtx, e, leg, body)
		if err != nil && legCtx.Err() == nil {
			giveUp(errPrefillFailed)
		}
		done <- err
	}()
	begun := p.decodeLegUntil(waiting, ctx, w, q, decodeBody(q.body, overlapParams(t, e.peer)))
	cancel() // nobody needs it any more
	if err := <-done; err != nil && !errors.Is(err, context.Canceled) {
		q.reason, q.prefillFailed = err.Error(), true
	}
	if !begun && ctx.Err() == nil {
		q.way = decodeOnly
		p.decodeLeg(ctx, w, q, decodeBody(q.body, nil))
	}
	q.prefill, q.prefillTime = leg.prefill, leg.prefillTime
}

// prefillLeg has one engine compute the prompt, and answers what the decode engine has to be told.
func (p *proxy) prefillLeg(ctx context.Context, e *engine, q *request, body []byte) (ticket object, refused bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, p.PrefillTimeout)
	defer cancel()
	begin := time.Now()
	q.prefill = e.url
	defer func() { q.prefillTime = time.Since(begin) }()
	answer, err := p.send(ctx, e, q, body)
	if err != nil {
		return nil, ctx.Err() == nil && e.failed(time.Now(), err), fmt.Errorf("prefill: %w", err)
	}
	defer answer.Body.Close()
	b, err := io.ReadAll(io.LimitReader(answer.Body, answerMax))
	if err != nil {
		return nil, false, fmt.Errorf("prefill: %w", err)
	}
	if answer.StatusCode != http.StatusOK {
		return nil, false, fmt.Errorf("prefill: %s", answer.Status)
	}
	if ticket, err = ticketOf(b); err != nil {
		return nil, false, fmt.Errorf("prefill: answer: %w", err)
	}
	return ticket, false, nil
}

// decodeLeg gives the client the answer of the first decode engine that has one.
func (p *proxy) decodeLeg(ctx context.Context, w http.ResponseWriter, q *request, body []byte) {
	p.decodeLegUntil(ctx, ctx, w, q, body)
}

// decodeLegUntil gives up when waiting ends before an engine has begun to answer, and answers false then. A client that is gone ends ctx, and both with it.
func (p *proxy) decodeLegUntil(waiting, ctx context.Context, w http.ResponseWriter, q *request, body []byte) bool {
	var err error
	for _, e := range p.decodes.order(time.Now()) {
		legCtx, cancel := context.WithCancel(ctx)
		stop := context.AfterFunc(waiting, cancel)
		begun := false
		begun, err = p.decodeAt(legCtx, func() bool { return stop() || ctx == waiting }, w, e, q, body)
		cancel()
		if begun || ctx.Err() != nil {
			q.err, q.cut = err, begun && err != nil
			return true
		}
		if waiting.Err() != nil {
			return false
		}
		p.Log.Warn("decode engine does not answer", "id", q.id, "engine", e.url, "error", err)
	}
	q.refuse(w, http.StatusBadGateway, fmt.Errorf("no decode engine answers: %w", err))
	return true
}

// decodeAt answers false when nothing was sent to the client: another engine may do it. commit is asked when the engine has begun to answer, and answers false when that is too late.
func (p *proxy) decodeAt(ctx context.Context, commit func() bool, w http.ResponseWriter, e *engine, q *request, body []byte) (begun bool, err error) {
	q.decode = e.url
	answer, err := p.send(ctx, e, q, body)
	if err != nil {
		if ctx.Err() == nil {
			e.failed(time.Now(), err)
		}
		return false, err
	}
	defer answer.Body.Close()
	if !commit() {
		return false, errPrefillFailed
	}
	p.hints.used(e.peer)
	q.firstTime, q.status = time.Since(q.begin), answer.StatusCode
	return pass(w, answer)
}

func (p *proxy) send(ctx context.Context, e *engine, q *request, body []byte) (*http.Response, error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, e.url+q.url, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	r.Header = q.header.Clone()
	r.Header.Set("Content-Type", "application/json")
	return p.client.Do(r)
}

// models is a decode engine's list.
func (p *proxy) models(w http.ResponseWriter, r *http.Request) {
	for _, e := range p.decodes.order(time.Now()) {
		out, err := http.NewRequestWithContext(r.Context(), http.MethodGet, e.url+"/v1/models", nil)
		if err != nil {
			break
		}
		out.Header = forEngines(r.Header)
		answer, err := p.client.Do(out)
		if err != nil {
			e.failed(time.Now(), err)
			continue
		}
		defer answer.Body.Close()
		if begun, err := pass(w, answer); begun || err == nil {
			return
		}
	}
	writeError(w, http.StatusBadGateway, "no decode engine answers")
}

// refuse answers with an error as OpenAI's API has them.
func (q *request) refuse(w http.ResponseWriter, status int, err error) {
	q.status, q.err = status, err
	writeError(w, status, err.Error())
}

func writeError(w http.ResponseWriter, status int, text string) {
	kind := "server_error"
	if status < 500 {
		kind = "invalid_request_error"
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(map[string]any{"error": map[string]any{"message": text, "type": kind, "code": status}})
}
