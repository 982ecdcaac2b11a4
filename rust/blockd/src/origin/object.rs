//! One remote object and its ranges.

use std::future::Future;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::SystemTime;

use http::header::{ACCEPT_ENCODING, CONTENT_RANGE, RANGE, RETRY_AFTER};
use http::{HeaderMap, HeaderValue, Response};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::{timeout, timeout_at, Duration, Instant};
use url::Url;

use super::check::{check, Validator};
use super::credentials::{Credentials, Current, Headers};
use super::transport::causes;
use super::{redirect, retry, OriginError, OriginOptions, Transport};

/// How long the end of a redirect is asked directly before the redirect itself is asked again.
const REDIRECT_LIFE: Duration = Duration::from_secs(30);
/// New credentials fetched for one request.
const MAX_RENEWALS: u32 = 2;

/// Who waits for the bytes. Each kind has requests of its own, so that bulk transfers never hold up a reader.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lane {
    /// A reader.
    Demand,
    /// Nobody yet.
    Background,
}

/// Takes an object's bytes in order.
pub trait Sink: Send {
    /// The next byte wanted.
    fn position(&self) -> u64;

    /// The origin sends the object from its first byte although a later one was asked for. The sink may go back to 0 and
    /// take everything; otherwise what lies before its position is dropped.
    fn rewind(&mut self);

    /// Takes the bytes at its position. May be more than the range asked for, if the origin ignores ranges.
    ///
    /// # Errors
    /// The transfer is over; the error is what [`HttpOrigin::stream`] returns.
    fn write(&mut self, bytes: &[u8]) -> impl Future<Output = Result<(), OriginError>> + Send;
}

/// Counters of all origins of a cache.
#[derive(Debug, Default)]
pub struct OriginStats {
    /// Requests sent, redirects included.
    pub requests: AtomicU64,
    /// Body bytes received.
    pub bytes: AtomicU64,
    /// Requests repeated after a failure.
    pub retries: AtomicU64,
    /// Credentials renewed.
    pub refreshes: AtomicU64,
}

/// An immutable object behind a URL.
pub struct HttpOrigin {
    url: Url,
    shown: Arc<str>,
    size: u64,
    options: OriginOptions,
    transport: Arc<Transport>,
    stats: Arc<OriginStats>,
    headers: Current,
    credentials: Arc<dyn Credentials>,
    pinned: OnceLock<Validator>,
    redirected: Mutex<Option<(Url, Instant)>>,
    demand: Semaphore,
    background: Semaphore,
}

impl HttpOrigin {
    /// An object of `size` bytes. Nothing is sent yet.
    ///
    /// # Errors
    /// [`OriginError::Url`].
    pub fn new(
        url: &str,
        size: u64,
        headers: Headers,
        credentials: Arc<dyn Credentials>,
        transport: Arc<Transport>,
        options: OriginOptions,
        stats: Arc<OriginStats>,
    ) -> Result<Self, OriginError> {
        let url = redirect::parse(url)?;
        Ok(Self {
            shown: redirect::shown(&url).into(),
            url,
            size,
            demand: Semaphore::new(options.demand_requests.max(1)),
            background: Semaphore::new(options.background_requests.max(1)),
            options,
            transport,
            stats,
            headers: Current::new(headers),
            credentials,
            pinned: OnceLock::new(),
            redirected: Mutex::new(None),
        })
    }

    /// The URL without its query.
    pub fn shown(&self) -> &Arc<str> {
        &self.shown
    }

    /// The URL.
    pub fn url(&self) -> &str {
        self.url.as_str()
    }

    /// Replaces the headers of later requests.
    pub fn set_headers(&self, headers: Headers) {
        self.headers.set(headers);
    }

    /// First contact: the object is there and has the declared size. Returns its validator.
    ///
    /// # Errors
    /// [`OriginError`].
    pub async fn probe(&self) -> Result<Validator, OriginError> {
        struct OneByte(u64);
        impl Sink for OneByte {
            fn position(&self) -> u64 {
                self.0
            }
            fn rewind(&mut self) {}
            async fn write(&mut self, bytes: &[u8]) -> Result<(), OriginError> {
                self.0 += bytes.len() as u64;
                Ok(())
            }
        }
        let _permit = self.permit(Lane::Demand).await?;
        self.stream(0..1, &mut OneByte(0)).await?;
        Ok(self.pinned.get().cloned().unwrap_or_default())
    }

    /// Leave to send requests. Hold it while streaming.
    ///
    /// # Errors
    /// [`OriginError::TooSlow`]: others did not finish in time.
    pub async fn permit(&self, lane: Lane) -> Result<SemaphorePermit<'_>, OriginError> {
        let gate = match lane {
            Lane::Demand => &self.demand,
            Lane::Background => &self.background,
        };
        let slow = |_| OriginError::TooSlow(self.options.budget);
        timeout(self.options.budget, gate.acquire()).await.map_err(slow)?.map_err(|_| OriginError::Closed)
    }

    /// Pushes the bytes of `range` into `sink`, from the sink's position on. A sink that is behind the end of the range
    /// when this returns has got everything, even if an error came later.
    ///
    /// # Errors
    /// [`OriginError`], after all retries.
    pub async fn stream<S: Sink>(&self, range: Range<u64>, sink: &mut S) -> Result<(), OriginError> {
        let mut pace = Pace::new(&self.options);
        let mut failures = 0;
        loop {
            let before = pace.received;
            let error = match self.attempt(sink.position()..range.end, sink, &mut pace).await {
                Ok(()) => return Ok(()),
                Err(_) if sink.position() >= range.end => return Ok(()),
                Err(error) => error,
            };
            failures = if pace.received > before { 1 } else { failures + 1 };
            let pause = match &error {
                OriginError::Busy(_, after) => (*after).max(retry::pause(&self.options, failures)),
                _ => retry::pause(&self.options, failures),
            };
            if !error.is_transient() || failures >= self.options.attempts || Instant::now() + pause >= pace.deadline {
                return Err(error);
            }
            tracing::debug!(url = %self.shown, %error, failures, ?pause, "retrying");
            self.stats.retries.fetch_add(1, Relaxed);
            tokio::time::sleep(pause).await;
        }
    }

    async fn attempt<S: Sink>(&self, range: Range<u64>, sink: &mut S, pace: &mut Pace) -> Result<(), OriginError> {
        if range.is_empty() {
            return Ok(());
        }
        let response = self.respond(&range, pace).await?;
        let unknown = Validator::default();
        let pinned = self.pinned.get().unwrap_or(&unknown);
        let sent = check(response.status(), response.headers(), &range, self.size, pinned)?;
        let found = Validator::of(response.headers());
        let pinned = self.pinned.get_or_init(|| found.clone());
        if !found.is_empty() && *pinned != found {
            // Another request was the first contact just now.
            check(response.status(), response.headers(), &range, self.size, pinned)?;
        }
        if sent.start < range.start {
            sink.rewind();
        }
        let mut body = response.into_body();
        let mut at = sent.start;
        while at < sent.end {
            let frame = pace.wait(body.frame()).await?;
            let frame = match frame {
                Some(Ok(frame)) => frame,
                Some(Err(error)) => return Err(OriginError::Request(causes(&error))),
                None => return Err(OriginError::Short(sent.end - at)),
            };
            let Some(bytes) = frame.data_ref() else { continue };
            let bytes = &bytes[..bytes.len().min(usize::try_from(sent.end - at).unwrap_or(usize::MAX))];
            self.stats.bytes.fetch_add(bytes.len() as u64, Relaxed);
            pace.arrived(bytes.len() as u64);
            let skip = sink.position().saturating_sub(at).min(bytes.len() as u64);
            at += bytes.len() as u64;
            if let Some(wanted) = bytes.get(skip as usize..).filter(|wanted| !wanted.is_empty()) {
                sink.write(wanted).await?;
            }
        }
        Ok(())
    }

    /// A response with a body that claims to be the range: redirects followed, credentials renewed.
    async fn respond(&self, range: &Range<u64>, pace: &mut Pace) -> Result<Response<Incoming>, OriginError> {
        let mut renewals = 0;
        loop {
            let (generation, headers) = self.headers.get();
            let response = self.follow(range, &headers, pace).await?;
            let status = response.status().as_u16();
            match status {
                200 | 206 => return Ok(response),
                401 | 403 if renewals == MAX_RENEWALS => return Err(OriginError::Unauthorized(status)),
                401 | 403 => {
                    renewals += 1;
                    let credentials = &*self.credentials;
                    let new = self.headers.renew(generation, status, self.url(), credentials, &self.options).await?;
                    self.stats.refreshes.fetch_add(u64::from(new), Relaxed);
                    pace.restart();
                }
                416 => return Err(self.outside(response.headers())),
                429 | 503 => {
                    let after = response.headers().get(RETRY_AFTER).and_then(|value| value.to_str().ok());
                    let after = after.and_then(|value| retry::retry_after(value, SystemTime::now()));
                    return Err(OriginError::Busy(status, after.unwrap_or_default()));
                }
                _ => return Err(OriginError::Status(status)),
            }
        }
    }

    /// `416`: every range asked for is inside the declared size, so the object must be shorter.
    fn outside(&self, headers: &HeaderMap) -> OriginError {
        let total = headers.get(CONTENT_RANGE).and_then(|value| value.to_str().ok());
        match total.and_then(|value| value.strip_prefix("bytes */")?.parse().ok()) {
            Some(found) => OriginError::WrongSize { declared: self.size, found },
            None => OriginError::Status(416),
        }
    }

    async fn follow(
        &self,
        range: &Range<u64>,
        headers: &Headers,
        pace: &Pace,
    ) -> Result<Response<Incoming>, OriginError> {
        if let Some(url) = self.remembered() {
            match self.get(&url, range, headers, pace).await {
                Ok(response) if response.status().is_success() => return Ok(response),
                _ => *self.redirected() = None,
            }
        }
        let mut url = self.url.clone();
        for hop in 0..=redirect::MAX_HOPS {
            let response = self.get(&url, range, headers, pace).await?;
            if !redirect::is_redirect(response.status()) {
                if hop > 0 && response.status().is_success() {
                    *self.redirected() = Some((url, Instant::now() + REDIRECT_LIFE));
                }
                return Ok(response);
            }
            url = redirect::target(&url, response.headers())?;
        }
        Err(OriginError::Redirect(format!("more than {} in a row", redirect::MAX_HOPS)))
    }

    fn redirected(&self) -> std::sync::MutexGuard<'_, Option<(Url, Instant)>> {
        self.redirected.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn remembered(&self) -> Option<Url> {
        let redirected = self.redirected();
        redirected.as_ref().filter(|(_, until)| *until > Instant::now()).map(|(url, _)| url.clone())
    }

    async fn get(
        &self,
        url: &Url,
        range: &Range<u64>,
        headers: &Headers,
        pace: &Pace,
    ) -> Result<Response<Incoming>, OriginError> {
        let mut all = if redirect::same_origin(&self.url, url) { headers.map().clone() } else { HeaderMap::new() };
        let value = format!("bytes={}-{}", range.start, range.end - 1);
        all.insert(RANGE, HeaderValue::from_str(&value).map_err(|error| OriginError::Request(error.to_string()))?);
        all.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        let uri = url.as_str().parse().map_err(|_| OriginError::Url("it cannot be sent".to_owned()))?;
        self.stats.requests.fetch_add(1, Relaxed);
        pace.wait(self.transport.get(uri, all)).await?
    }
}

/// Bounds every wait of one [`HttpOrigin::stream`].
struct Pace {
    stall: Duration,
    budget: Duration,
    step: u64,
    /// All bytes so far, and those since the budget was renewed.
    received: u64,
    since: u64,
    deadline: Instant,
}

impl Pace {
    fn new(options: &OriginOptions) -> Self {
        Self {
            stall: options.stall_timeout,
            budget: options.budget,
            step: options.pace,
            received: 0,
            since: 0,
            deadline: Instant::now() + options.budget,
        }
    }

    fn restart(&mut self) {
        self.since = 0;
        self.deadline = Instant::now() + self.budget;
    }

    fn arrived(&mut self, bytes: u64) {
        self.received += bytes;
        self.since += bytes;
        if self.since >= self.step {
            self.restart();
        }
    }

    async fn wait<T>(&self, future: impl Future<Output = T>) -> Result<T, OriginError> {
        let stalled = Instant::now() + self.stall;
        timeout_at(stalled.min(self.deadline), future).await.map_err(|_| {
            if stalled <= self.deadline {
                OriginError::Stalled(self.stall)
            } else {
                OriginError::TooSlow(self.budget)
            }
        })
    }
}
